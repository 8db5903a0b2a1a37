"""`jax-sparse-mla serve`: what is refused before anything is loaded, and what the package imports without the extra."""

import ast
import contextlib
import socket
from pathlib import Path

import pytest

import jax_sparse_mla
from jax_sparse_mla.cli import main, serve

PACKAGE = Path(jax_sparse_mla.__file__).parent


def refused(capsys, *args):
    status = main(["serve", *args])
    out, err = capsys.readouterr()
    assert status == 2 and err.startswith("jax-sparse-mla serve: ") and err.count("\n") == 1 and not out, (out, err)
    return err


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(serve, "NEEDS", (*serve.NEEDS, "no_such_package"))
    assert 'this needs no_such_package: pip install "jax-sparse-mla[serve]"' in refused(capsys)


def test_a_port_that_is_taken_and_a_host_that_is_none(capsys):
    pytest.importorskip("uvicorn")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert "in use" in refused(capsys, "--port", str(taken.getsockname()[1]))
    assert "--host nowhere.invalid" in refused(capsys, "--host", "nowhere.invalid")
    assert "--port 70000: must be below 65536" in refused(capsys, "--port", "70000")


@pytest.mark.parametrize("text", ["", "\n", "naïve", "two\nlines"])
def test_a_key_that_is_none(capsys, tmp_path, monkeypatch, text):
    pytest.importorskip("uvicorn")
    (tmp_path / "key").write_text(text)
    assert "must be printable ASCII" in refused(capsys, "--api-key-file", str(tmp_path / "key"))
    monkeypatch.setenv("JAX_SPARSE_MLA_API_KEY", text)
    assert "JAX_SPARSE_MLA_API_KEY must be printable ASCII" in refused(capsys)
    assert "no_such_file" in refused(capsys, "--api-key-file", str(tmp_path / "no_such_file"))


def test_a_template_that_is_none_is_refused_before_programs_are_compiled(capsys, tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("jax_sparse_mla.serving.start.sized", None)
    template = tmp_path / "template"
    template.write_bytes(b"\xff")
    assert f"{template} is no UTF-8: invalid start byte at byte 0" in refused(capsys, "--chat-template", str(template))
    template.write_text("{% for %}")
    arguments = "--port", "0", "--device", "cpu", "--warmup", "--chat-template", str(template)
    assert main(["serve", *arguments]) == 2 and "the chat template is none" in capsys.readouterr().err


def test_no_such_folder(capsys, tmp_path):
    pytest.importorskip("uvicorn")
    status = main(["serve", "--port", "0", "--device", "cpu", "--model", str(tmp_path / "none")])
    assert status == 2 and "no checkpoint folder" in capsys.readouterr().err


def test_only_the_server_imports_what_the_extra_brings():
    """And it imports neither torch nor transformers."""
    imported, brought = {}, {"starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            place = path.relative_to(PACKAGE).as_posix()
            place = "server" if place.startswith("server/") else place
            imported.setdefault(place, set()).update(name.split(".")[0] for name in names)
    server = imported.pop("server") | imported.pop("cli/listen.py")  # which `serve` alone imports, when it runs
    assert brought <= server and not {"torch", "transformers"} & server
    assert not {part: found for part, names in imported.items() if (found := names & brought)}
