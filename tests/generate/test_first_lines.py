"""The first lines of `jax-sparse-mla`: the device and the model, before JAX is imported."""

import re

import jax
import pytest
from test_cli import HAS_MODELS, python, run

from jax_sparse_mla.cli import setup, start

FIRST = """
import sys
from jax_sparse_mla.cli import {command} as command, start

def announce(*arguments):
    announced(*arguments)
    sys.exit(bool({{"jax", "jaxlib", "numpy", "torch"}} & set(sys.modules)) + 3)

announced, start.announce = start.announce, announce
from jax_sparse_mla.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_device_and_model_are_said_before_jax_is_imported(command):
    if command == "generate" and not HAS_MODELS:
        pytest.skip("the check, which begins before, needs torch and transformers")
    if command == "serve":
        pytest.importorskip("uvicorn")
    arguments = {"generate": ("--preset", "v32", "--mesh", "2x1"), "serve": ("--port", "0")}[command]
    for more in ((), arguments):
        done = python(FIRST.format(command=command), command, *more)
        assert done.returncode == 3, (done.stdout, done.stderr)
        assert done.stdout.startswith("device     CPU") and "\nmodel      preset v" in done.stdout
    mesh = ", a mesh of 2 shares of the requests and 1 devices over heads and experts"
    assert (mesh in done.stdout) == (command == "generate")


@pytest.mark.parametrize("wanted", [None, "cuda"])
def test_the_first_line_follows_the_driver_and_jax_has_the_last_word(capsys, monkeypatch, wanted):
    """A GPU that the driver names and JAX does not use is not left standing as the device."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for plugin, gpu, said in ((True, "NVIDIA H200", "NVIDIA H200"), (False, "NVIDIA H200", "CPU"), (True, None, "CPU")):
        monkeypatch.setattr(start, "has_cuda_plugin", lambda plugin=plugin: plugin)
        monkeypatch.setattr(start, "_first_gpu", lambda gpu=gpu: gpu)
        assert start._device_ahead(None) == said and start._device_ahead("cpu") == "CPU"
    monkeypatch.setattr(start, "_first_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(setup, "begin_to_load", None)  # what comes next raises
    options = ["--device", wanted] if wanted else []
    _, out, err = run(capsys, "generate", "--no-check", "--prompt", "hello", *options)
    device = re.findall(r"^device +(.*)$", out, re.M)
    assert device == (["NVIDIA H200"] if wanted else ["NVIDIA H200", "CPU"])
    assert ("--device cuda: JAX" in err) == bool(wanted)
    monkeypatch.setattr(start, "_first_gpu", lambda: None)
    _, out, err = run(capsys, "generate", "--no-check", "--prompt", "hello", "--device", "cuda")
    assert not out and "--device cuda: JAX" in err
