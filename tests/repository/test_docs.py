"""The documents: their code runs, the API reference has every public name, docstrings name real parameters."""

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import jax_sparse_mla as mla
from jax_sparse_mla import layers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = (ROOT / "jax_sparse_mla", ROOT / "interop" / "sparse_mla_torch")


def documented():
    """The names that the API reference shows."""
    pages = [path.read_text() for path in (DOCS / "reference" / "api").glob("*.md")]
    return {name for page in pages for name in re.findall(r"^::: ([\w.]+)", page, re.MULTILINE)}


def test_every_public_name_is_in_the_api_reference():
    public = {f"jax_sparse_mla.{name}" for name in mla.__all__}
    public |= {f"jax_sparse_mla.layers.{name}" for name in layers.__all__}
    assert public - documented() == set()


def test_every_page_is_in_the_navigation():
    shown = set(re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert shown == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run(source, page):
    names = {"__name__": page.stem}
    exec(compile(source, page, "exec"), names)
    return names


@pytest.mark.always("step")
@pytest.mark.parametrize("guide", ["step", "guides/serving", "guides/replay"])
def test_a_guide_runs(guide):
    page = DOCS / f"{guide}.md"
    run("\n".join(python_blocks(page)), page)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_readmes_first_results(framework):
    pytest.importorskip(framework)
    page = ROOT / "README.md"
    (source,) = (block for block in python_blocks(page) if block.startswith(f"import {framework}\n"))
    names = run(source, page)
    out, lse = (
        np.asarray(x.astype("float32") if framework == "jax" else x.float()) for x in (names["out"], names["lse"])
    )
    assert out.shape == (1, 1, 128, 512) and lse.size == 128
    assert np.isfinite(out).all() and np.isfinite(lse).all() and out.any()


def args_lists(tree):
    """Each function that has an Args list, with its parameters and the names in the list."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        found = re.search(r"^Args:\n((?:  .*\n|\n)+)", inspect.cleandoc(ast.get_docstring(node) or "") + "\n", re.M)
        if found:
            named = re.findall(r"^  (\w+(?:, \w+)*):", found[1], re.MULTILINE)
            parameters = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
            yield node, parameters, {name for one in named for name in one.split(", ")}


def test_docstrings_name_parameters_that_exist():
    wrong, lists = [], 0
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for function, parameters, named in args_lists(ast.parse(path.read_text())):
            lists += 1
            wrong += [f"{path.relative_to(ROOT)}:{function.lineno}: {name}" for name in sorted(named - parameters)]
    assert lists > 50 and wrong == []
