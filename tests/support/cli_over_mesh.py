"""The command over meshes of virtual CPU devices, in processes that tests/serving/test_cli_over_mesh.py starts.

python cli_over_mesh.py [CASE ...]               four devices; prints RESULTS and a JSON object, case → traceback
python cli_over_mesh.py --run BREAK ARGUMENT…    the command itself with these arguments; BREAK: none, or the engine
                                                 raises or stops for ever in its fourth step
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import tempfile

import jax
from serving_over_mesh import V32, WINDOWS, write_v4
from virtual_devices import run_cases

from jax_sparse_mla.cli import main, setup
from jax_sparse_mla.cli.setup import MeshSetup
from jax_sparse_mla.serving import memory, presets
from jax_sparse_mla.serving.engine import Engine

presets.CONFIGS = {**presets.CONFIGS, "v4": WINDOWS, "v32": V32}
setup.keep_programs = lambda: None
GENERATE = ["generate", "--prompt", "hello to all of the world", "--max-new-tokens", "4", "--chunk-size", "32"]
GENERATE += ["--verbose"]


def run(*args):
    """The exit status of `jax-sparse-mla *args`, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main([*map(str, args)])
    return status, out.getvalue(), err.getvalue()


def generated(out):
    return re.findall(r"tokens \[(.*)\]", out)


def with_the_check():
    """Requests and heads over two devices each; and a check that fails, as one device has other parameters."""
    args = [*GENERATE, "--requests", 4, "--mesh", "2x2"]
    status, out, _ = run(*args)
    assert status == 0, out
    assert "a mesh of 2 shares of the requests and 2 devices over heads" in out and "4 heads on each device" in out
    assert re.search(r"^tokens +16 of 16 are one device's", out, re.M) or "differs, under a top-2 margin" in out
    assert "check      passed" in out and len(generated(out)) == 4

    real = MeshSetup.new_engine_of_one_device

    def of_other_parameters(setup, engine):
        model, params = setup.whole
        setup.whole = model, jax.tree.map(lambda x: -x if x.ndim == 3 else x, params)
        return real(setup, engine)

    MeshSetup.new_engine_of_one_device = of_other_parameters
    try:
        status, failed, _ = run(*args)
    finally:
        MeshSetup.new_engine_of_one_device = real
    assert status == 1 and "check      FAILED" in failed and generated(failed) == generated(out)

    _, plain, _ = run(*args, "--no-check")
    assert generated(plain) == generated(out) and "check" not in plain and "one device" not in plain


def context_parallel():
    """Two devices share the pages: the tokens of one device."""
    status, out, err = run(*GENERATE, "--preset", "v32", "--requests", 2, "--mesh", "1x2", "--context-parallel")
    assert status == 0 and "check      passed" in out and len(generated(out)) == 2, (out, err)
    assert "64 tokens a page, shared by 2 devices, for 2 layers of 2 heads on each device" in out, out


def from_a_folder():
    """Without the check layer by layer to the devices: the same tokens as cut from the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        write_v4(folder, WINDOWS)
        args = [*GENERATE, "--model", folder, "--mesh", "1x2", "--max-new-tokens", 3]
        (status, out, err), (_, plain, _) = run(*args), run(*args, "--no-check")
    assert status == 0 and generated(out) and generated(plain) == generated(out), (out, err, plain)


def speculative():
    """Drafts over two devices: compared with plain decoding there, which is compared with one device."""
    status, out, _ = run(*GENERATE, "--requests", 2, "--mesh", "2x1", "--speculative-steps", 2, "--draft-oracle", 0.7)
    assert status == 0 and out.count("check      passed") == 2, out
    assert re.search(r"are one device's.*are plain decoding's", out, re.S)


def refusals():
    for args, words in (
        ([*GENERATE, "--mesh", "3x2"], "a mesh of 3x2 takes 6 devices, JAX has 4"),
        ([*GENERATE, "--context-parallel"], "--context-parallel needs a --mesh of several devices in a share"),
        ([*GENERATE, "--mesh", "2x1", "--context-parallel"], "needs a --mesh of several devices in a share"),
        ([*GENERATE, "--mesh", "1x3"], "3 devices cannot share 8 heads evenly"),
    ):
        status, out, err = run(*args)
        assert status == 2 and "KV cache" not in out and words in err, (args, out, err)

    memory.device_memory, real = lambda: 8 << 20, memory.device_memory
    status, out, err = run(*GENERATE, "--mesh", "2x2")
    memory.device_memory = real
    assert status == 2 and "KV cache" not in out, (out, err)
    assert "the check on one device, which --no-check leaves out, needs" in err, err


CASES = {case.__name__: case for case in (with_the_check, context_parallel, from_a_folder, speculative, refusals)}


def break_at_the_fourth_step(how):
    steps, real = [], Engine.step

    def step(engine):
        steps.append(engine)
        if len(steps) == 4 and how == "raise":
            raise KeyError("a failure of one process")
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(engine)

    Engine.step = step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        if sys.argv[2] != "none":
            break_at_the_fourth_step(sys.argv[2])
        sys.exit(main(sys.argv[3:]))
    run_cases(CASES, sys.argv[1:] or CASES)
