"""transformers' process beside the command: what it imports, how it answers, and that it ends with the command."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import as_preset, small_v4_config, small_v32_config
from sparse_mla_torch import check
from sparse_mla_torch.check.process import Process

from jax_sparse_mla.cli import endings, generation, main
from jax_sparse_mla.serving import presets


@pytest.fixture(scope="module")
def process():
    """One for all: its imports take seconds."""
    process = Process()
    yield process
    process.close()


def ended(pid: int) -> bool:
    """Whether a process has ended, whoever is to take notice of it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_command_imports_no_torch_and_the_process_no_jax():
    for code, absent in (
        ("from sparse_mla_torch.check import Check, comparison; Check().close()", "torch"),
        ("from sparse_mla_torch.eager.imports import import_eager; import_eager()", "jax"),
    ):
        code = f"import sys; {code}; sys.exit({absent!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0, absent


def test_the_process_leaves_out_imports():
    """A model runs without the rest, and torch's compiler is whole for whoever asks for it."""
    left_out = "scipy", "torch._inductor", "torch._dynamo.eval_frame", "torch.distributed.tensor"
    code = f"""if True:
        import sys
        from sparse_mla_torch.eager.imports import import_eager
        eager = import_eager()()
        eager.build({as_preset(small_v32_config())})
        eager.agreeing(1, [1, 2, 3])
        assert not [name for name in {left_out} if sys.modules.get(name)]
        import torch
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(())) == 2
        assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
    """
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_it_runs_the_model_that_all_of_transformers_runs(process, tmp_path):
    from sparse_mla_torch.eager.model import Eager

    rng, hidden = np.random.default_rng(0), [np.ones((20, 64), np.float32)]
    for config in (small_v32_config(), small_v4_config()):
        eager = Eager()
        names = eager.build(as_preset(config))
        arrays = {name: rng.normal(0, 0.1, eager.model.state_dict()[name].shape).astype(np.float32) for name in names}
        eager.fill(arrays, False)
        eager.model.save_pretrained(tmp_path / config.model_type)
        process.load(str(tmp_path / config.model_type))
        loaded = process.attend(1, hidden, [None])
        assert process.build(as_preset(config)) == names
        process.fill(arrays, False)
        for results in loaded, process.attend(1, hidden, [None]):
            for ours, expected in zip(results[0], eager.attend(1, hidden, [None])[0], strict=True):
                np.testing.assert_array_equal(ours, expected)


def test_it_runs_a_model_and_says_what_fails(process):
    names = process.build(as_preset(small_v32_config()))
    assert "lm_head.weight" in names
    process.fill({"lm_head.weight": np.zeros((256, 64), np.float32)}, False)
    assert process.agreeing(3, [1, 2, 3, 0, 0]) == 2 and process.agreeing(3, [1, 2, 3, 7]) == 0
    ((output, selected),) = process.attend(0, [np.ones((5, 64), np.float32)], [None])
    assert output.shape == (5, 64) and output.dtype == np.float32 and selected.shape == (5, 5)
    with pytest.raises(OSError, match="no checkpoint folder /nowhere"):
        process.load("/nowhere")
    with pytest.raises(ValueError, match="no_such_model"):
        process.build({"model_type": "no_such_model"})
    with pytest.raises(RuntimeError, match="IndexError: ") as raised:
        process.attend(99, [], [])
    assert "in attend" in raised.value.__notes__[0]


def test_an_interrupt_is_the_command_s(process):
    os.kill(process._process.pid, signal.SIGINT)
    with pytest.raises(OSError, match="no checkpoint folder"):
        process.load("/nowhere")


def test_what_does_not_import_is_said(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), os.pathsep)
    process = Process()
    try:
        with pytest.raises(ImportError, match=r"libcudart.so.99 is missing"):
            process.load("/nowhere")
    finally:
        process.close()


def test_a_process_that_dies_is_said():
    process = Process()
    process._process.send_signal(signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="the process that runs transformers has ended, status -9"):
        process.load("/nowhere")
    process.close()


def test_it_ends_with_a_command_that_is_killed():
    """While it imports, too."""
    code = "from sparse_mla_torch.check.process import Process; p = Process(); print(p._process.pid, flush=True); "
    command = [sys.executable, "-c", code + "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        parent.kill()
    for _ in range(600):
        if ended(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it goes on")


@pytest.fixture
def begun(monkeypatch):
    """The processes that a command begins."""
    made = []
    monkeypatch.setitem(presets.CONFIGS, "v32", as_preset(small_v32_config()))
    monkeypatch.setattr(check, "Process", lambda: made.append(Process()) or made[-1])
    return made


@pytest.mark.parametrize("ending", ["refused", "interrupted", "died"])
def test_however_a_command_ends_its_process_has_ended(capsys, monkeypatch, begun, ending):
    monkeypatch.setattr(endings.threading, "active_count", lambda: 1)  # else an interrupt ends this process

    def serve(args, setup, engine, requests):
        if ending == "interrupted":
            raise KeyboardInterrupt
        begun[0]._process.kill()

    monkeypatch.setattr(generation, "_serve", serve)
    model = ["--model", "/nowhere"] if ending == "refused" else ["--preset", "v32"]
    status = main(["generate", *model, "--prompt", "hello", "--chunk-size", "16"])
    out, err = capsys.readouterr()
    assert status == (130 if ending == "interrupted" else 2) and begun[0]._process.returncode == -9
    if ending == "died":
        assert out.endswith("check      not done: transformers' model could not be loaded\n")
        assert err.endswith("generate: the process that runs transformers has ended, status -9\n")


def test_a_process_that_dies_in_the_comparison(capsys, monkeypatch, begun):
    def compare(check, engine, requests):
        begun[0]._process.kill()
        check._eager.agreeing(1, [1, 2])

    monkeypatch.setattr(generation, "_serve", lambda *_: None)
    monkeypatch.setattr(check.Check, "load_arrays", lambda *_: None)
    monkeypatch.setattr(check.Check, "compare", compare)
    assert main(["generate", "--preset", "v32", "--prompt", "hello", "--chunk-size", "16"]) == 2
    assert capsys.readouterr().out.endswith("check      not done: transformers did not run to its end\n")
