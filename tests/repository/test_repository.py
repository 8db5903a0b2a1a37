"""The repository as a whole: examples run, README and CI agree, files stay readable and free of this machine."""

import ast
import graphlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse_mla as mla
from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax_sparse_mla", "interop/sparse_mla_torch")
MAX_LINES = 600


def tracked_files():
    """Files that belong to the repository: tracked, or new and not ignored; without git, all of its folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        files = [ROOT / name for name in listed if name]
    else:
        folders = (*PACKAGES, "tests", "docs", "examples", "benchmarks", "kernels_cuda", ".ci")
        files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        files += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml")]
        files = [path for path in files if path.suffix not in (".so", ".zip")]  # git ignores compiled kernels
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_suite_is_collected_without_torch():
    """Tests that need it are skipped, wherever their module imports it from."""
    absent = "sys.modules |= dict.fromkeys(('torch', 'transformers', 'safetensors'))"
    run = f"import sys; {absent}; import pytest; sys.exit(pytest.main(['-q', '-n0', '--collect-only', 'tests']))"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "could not import 'torch'" in done.stdout, done.stdout[-2000:] + done.stderr


def test_jax_example(capsys):
    out = load(ROOT / "examples" / "jax_decode.py").main()
    assert out.shape == (2, 64, 512) and out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.asarray(out, np.float32).any()
    assert "compilations: 1 " in capsys.readouterr().out


def test_torch_example():
    torch = pytest.importorskip("torch")
    out = load(ROOT / "examples" / "torch_decode.py").main()
    assert out.shape == (2, 1, 128, 512) and out.dtype == torch.bfloat16
    assert out.float().isfinite().all() and out.float().any()
    # Both rows read the same keys with other queries.
    assert not torch.equal(out[0], out[1])


def readme():
    return (ROOT / "README.md").read_text()


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(title, text):
    """The text under the heading that starts with `title`, up to the next heading of its level."""
    match = re.search(rf"^(#+) {title}\b.*?\n(.*?)(?=^\1 |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"no heading starts with {title!r}"
    return match[2]


def commands(script):
    """The commands of a shell script, without comments, options of the shell and changes of directory."""
    lines = script.replace("\\\n", " ").splitlines()
    split = [part.strip() for line in lines for part in re.split(r"&&|;", line)]
    return [" ".join(part.split()) for part in split if part and not re.match(r"#|set -|cd ", part)]


def first_command(title, text):
    """The commands of the first shell block under the heading."""
    shown = [block for language in ("bash", "sh", "shell", "") for block in fenced(section(title, text), language)]
    assert shown, f"no command stands under the heading {title}"
    return commands(shown[0])


def test_ci_runs_the_documented_commands():
    """README's command for the tests, then the one of docs/contributing.md for the documents."""
    tests = first_command("Test", readme())
    documents = first_command("Read", (ROOT / "docs" / "contributing.md").read_text())
    assert any("pip install" in command for command in tests) and any("pytest" in command for command in tests)
    assert any("mkdocs build --strict" in command for command in documents)
    script = ROOT / ".ci" / "run"
    assert commands(script.read_text()) == tests + documents
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"


def test_the_readme_runs_a_command_and_fits_on_a_page():
    assert any("jax-sparse-mla generate" in command for command in first_command("Run", readme()))
    assert len(readme().splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs"])
def test_pages_name_what_exists(page):
    for path in sorted((ROOT / page).rglob("*.md")) or [ROOT / page]:
        text = path.read_text()
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (path.parent / link).exists(), link
        for name in re.findall(r"`((?:examples|docs|benchmarks|tests|kernels_cuda)/[\w./-]+)(?:::\w+)?`", text):
            assert (ROOT / name).exists(), name
        for module in re.findall(r"python -m ((?:benchmarks|jax_sparse_mla)[\w.]*)", text):
            path_of_module = ROOT / module.replace(".", "/")
            assert path_of_module.with_suffix(".py").exists() or (path_of_module / "__main__.py").exists(), module


def test_printed_benchmarks_take_their_arguments(monkeypatch, capsys):
    """Each command of the pages lists its cases, which needs no GPU; torch's are left out where torch is."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    command = r"`python -m benchmarks ([^`]+)`|^[^`\n]*python -m benchmarks ([^`#\n]+)"  # in a line, in a block
    printed = [words for page in pages for words in re.findall(command, page.read_text(), re.MULTILINE)]
    assert len(printed) > 20
    monkeypatch.setattr(sys, "argv", sys.argv)
    for words in sorted({"".join(words) for words in printed}):
        names, arguments = benchmarks.split(shlex.split(words))
        assert names, words
        for name in names:
            try:
                status = benchmarks.run(name, [*arguments, "--dry-run"])
            except SystemExit as end:
                status = end.code
            except ModuleNotFoundError as error:
                assert error.name in ("torch", "triton"), words
                continue
            assert status == 0, f"python -m benchmarks {words}: {capsys.readouterr().err}"


def test_versions_agree():
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', pyproject, re.MULTILINE)[1]
    assert mla.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace("]", "")


def test_every_package_and_kernel_source_is_in_the_wheel():
    """pyproject.toml lists packages one by one, for `kernels_cuda` lies at the top level of the repository."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved, carried = setuptools["package-dir"], setuptools["package-data"]
    folders = {}
    for name in setuptools["packages"]:
        first = name.split(".")[0]
        folders[name] = ROOT / moved.get(name, "/".join([moved.get(first, first), *name.split(".")[1:]]))
    files = [
        path for path in tracked_files() if path.relative_to(ROOT).as_posix().startswith((*PACKAGES, "kernels_cuda"))
    ]
    assert {path.parent for path in files if path.suffix == ".py"} | {ROOT / "kernels_cuda"} == set(folders.values())
    data = {path for name, folder in folders.items() for glob in carried.get(name, []) for path in folder.glob(glob)}
    built = {path for path in data if path.suffix in (".so", ".zip")}  # by jax_sparse_mla.launch.build, for a wheel
    assert {path for path in files if path.suffix not in (".py", ".md")} == data - built


def test_files_of_the_packages_are_short():
    long = {}
    for path in tracked_files():
        if path.suffix == ".py" and path.relative_to(ROOT).as_posix().startswith(PACKAGES):
            lines = len(path.read_text().splitlines())
            long |= {path.name: lines} if lines > MAX_LINES else {}
    assert not long


def test_the_torch_package_imports_nothing_private():
    """What it takes of jax_sparse_mla, that package's modules show without a leading underscore."""
    paths = modules_of("interop/sparse_mla_torch").values()
    pairs = [pair for path in paths for node in ast.walk(ast.parse(path.read_text())) for pair in imported_by(node)]
    ours = {f"{of}.{name}" if name else of for of, name in pairs if of.startswith("jax_sparse_mla")}
    assert ours and not {name for name in ours if "._" in name}


def imported_by(node):
    """(module, name or None) of what a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module, alias.name) for alias in node.names]
    return [(alias.name, None) for alias in node.names] if isinstance(node, ast.Import) else []


def imported_at_once(path):
    """As `imported_by`, of all statements that run when the file is imported."""
    found, left = [], list(ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        found += imported_by(node)
        if isinstance(node, (ast.If, ast.Try, ast.With)) and "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]:
            left += [x for field in ("body", "orelse", "handlers", "finalbody") for x in getattr(node, field, ())]
        elif isinstance(node, ast.ExceptHandler):
            left += node.body
    return found


def modules_of(package):
    """The file of each module of a package, by its name."""
    folder = ROOT / package
    paths = {path.relative_to(folder.parent).with_suffix(""): path for path in folder.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_each_other_in_no_circle(package):
    """A submodule's name taken of a package is an import of the submodule, another name one of the package."""
    modules = modules_of(package)
    imports = {}
    for module, path in modules.items():
        pairs = [(of, f"{of}.{name}") for of, name in imported_at_once(path)]
        taken = {deeper if deeper in modules else of for of, deeper in pairs}
        imports[module] = taken & modules.keys() - {module}
    assert sum(map(len, imports.values())) > len(modules)
    graphlib.TopologicalSorter(imports).prepare()  # an error names a circle


def test_jax_s_package_imports_torch_only_where_it_is_called():
    paths = modules_of("jax_sparse_mla").values()
    at_once = {(path.name, of) for path in paths for of, _ in imported_at_once(path)}
    assert ("api.py", "jax") in at_once and not {pair for pair in at_once if pair[1].split(".")[0] == "torch"}


# Spelled so that this file does not find itself.
MACHINE_PATHS = [
    r"/wor[k]/(?:main|shared|venvs|brief)",
    r"(?<![\w.~/])/roo[t]/",
    r"(?<![\w.~])/hom[e]/\w",
    r"/User[s]/\w",
]
REGISTRIES = [r"pypi[.]org", r"pythonhosted[.]org", r"anaconda[.]org", r"index[-]url", r"artifactor[y]"]


def test_no_file_mentions_a_machine_or_a_registry():
    pattern = re.compile("|".join(MACHINE_PATHS + REGISTRIES))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # a binary
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{path.relative_to(ROOT)}:{i}: {line.strip()[:80]}" for i, line in lines if pattern.search(line)]
    assert found == []


def test_the_patterns_find_what_they_should():
    pattern = re.compile("|".join(MACHINE_PATHS + REGISTRIES))
    for text in ("see @work/main/x", "in @root/.cache", "@home/me/x", "https:@/pypi.@org/simple"):
        assert pattern.search(text.replace(".@", ".").replace("@", "/")), text
    for text in ("github.com/a/root/b", "cuda/home", "network/mainline", "a ~/home path"):
        assert not pattern.search(text), text
