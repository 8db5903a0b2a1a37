"""What goes wrong in `generate`: one line and a status, no traceback; and what it warns of."""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

pytest.importorskip("torch")
from hf_models import as_preset, random_model, small_v32_config

from jax_sparse_mla.cli import endings, generation, main
from jax_sparse_mla.serving import memory, presets

SERVED = ["generate", "--preset", "v32", "--no-check", "--chunk-size", "16"]
needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's memory is the host's")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Small models, which serve nothing."""
    monkeypatch.setitem(presets.CONFIGS, "v32", as_preset(small_v32_config()))
    monkeypatch.setattr(generation, "_serve", lambda *_: collections.Counter())


def run(capsys, *args):
    """The exit status of `jax-sparse-mla *args`, what it printed, and the last line of its standard error."""
    status = main(list(map(str, args)))
    out, err = capsys.readouterr()
    return status, out, err, (err.splitlines() or [""])[-1]


# Memory


@needs_cpu
@pytest.mark.parametrize(
    "args, words",
    [
        (["--max-new-tokens", 100_000_000], "--max-new-tokens 100000000"),
        (["--max-new-tokens", 300_000], "weights and caches need .* --max-new-tokens 300000"),
        (["--max-new-tokens", 10**30], f"tables for 1 requests .* --max-new-tokens {10**30}"),
        (["--requests", 10_000_000], "--requests 10000000 with prompts of up to 5 tokens need"),
        (["--chunk-size", 10**9], "--chunk-size 1000000000 tokens need at least"),
        (["--prompt-file", "long"], r"--prompt-file \S*long of 1073741824 bytes needs 32.0 GiB"),
    ],
)
def test_what_does_not_fit_is_refused(capsys, monkeypatch, tmp_path, args, words):
    """Before it is asked for, in words of the options."""
    monkeypatch.setattr(memory, "host_memory", lambda: 1 << 28)
    with open(tmp_path / "long", "wb") as file:
        file.truncate(1 << 30)
    args = ["--prompt", "hello", *args] if args[-1] != "long" else [args[0], tmp_path / "long"]
    status, out, err, line = run(capsys, *SERVED, *args)
    assert status == 2 and "KV cache" not in out and "Traceback" not in err
    assert line.startswith("jax-sparse-mla generate: does not fit: "), err
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prompt-file", "/dev/zero"], "--prompt-file /dev/zero has more than 100000000 bytes"),
        (["--prompt", "hello", "--speculative-steps", 33], "--speculative-steps must be at most 32, got 33"),
    ],
)
def test_what_has_no_end_or_a_limit_is_refused(capsys, args, words):
    status, out, _, line = run(capsys, *SERVED, *args)
    assert (status, line) == (2, f"jax-sparse-mla generate: {words}") and "KV cache" not in out


def test_more_slots_than_an_int32_counts(capsys, monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 1 << 60)
    status, _, _, line = run(capsys, *SERVED, "--prompt", "hello", "--max-new-tokens", 2**31)
    assert status == 2 and "slots, more than an int32 counts (with --max-new-tokens 2147483648" in line


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    random_model(small_v32_config(), 0).save_pretrained(folder)
    return folder


def of_checkpoint(folder, **changes):
    """The command for a checkpoint whose config has these changes."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return ["generate", "--model", folder, "--no-check", "--chunk-size", 16, "--prompt", "hello"]


def test_a_missing_tokenizer_and_a_long_prompt_are_said(capsys, checkpoint):
    command = of_checkpoint(checkpoint, max_position_embeddings=9)
    status, out, _, _ = run(capsys, *command, "--max-new-tokens", 4)
    assert status == 0 and f"warning    {checkpoint} has no tokenizer: text goes in and out as bytes\n" in out
    assert "max_position" not in out
    status, out, _, _ = run(capsys, *command, "--max-new-tokens", 5)
    assert status == 0
    assert f"the longest request has up to 10 tokens, and max_position_embeddings of {checkpoint} is 9\n" in out
    assert "max_position" not in run(capsys, *of_checkpoint(checkpoint, max_position_embeddings=None))[1]


@pytest.mark.parametrize("token", [256, 2**40])
def test_a_tokenizer_larger_than_the_model(capsys, checkpoint, monkeypatch, token):
    tokenizer = presets.ByteTokenizer()
    tokenizer.encode = lambda text: [1, token, 2]
    monkeypatch.setattr(presets, "load_tokenizer", lambda *_: tokenizer)
    status, out, err, line = run(capsys, *of_checkpoint(checkpoint))
    assert status == 2 and "KV cache" not in out and "Traceback" not in err
    assert f"the tokenizer of {checkpoint} gives the prompt token {token}, the model has a vocabulary of 256" in line


def test_a_line_is_not_endless(capsys, tmp_path):
    *_, line = run(capsys, "generate", "--no-check", "--model", tmp_path / ("x" * 90_000))
    assert line.endswith("…") and len(line) < 2100


# Faults, interrupts, and output that nobody reads


def raising(monkeypatch, error):
    def serve(*_):
        raise error

    monkeypatch.setattr(generation, "_serve", serve)
    return [*SERVED, "--prompt", "hello"]


class Panic(BaseException):
    """As one of Rust's."""


@pytest.mark.parametrize("error", [KeyError("a\nfault"), MemoryError(), ValueError("late"), Panic("a fault")])
def test_a_fault_is_one_line(capsys, monkeypatch, error):
    command = raising(monkeypatch, error)
    status, out, err, line = run(capsys, *command)
    assert status == 2 and "KV cache" in out and "Traceback" not in err
    assert (
        line
        == f"jax-sparse-mla generate: {endings.one_line(f'{type(error).__name__}: {error}')} (--verbose prints where)"
    )
    status, _, err, line = run(capsys, *command, "--verbose")
    assert status == 2 and "Traceback" in err and "in serve" in err and "--verbose" not in line


def test_an_interrupt_in_a_run(capsys, monkeypatch):
    monkeypatch.setattr(endings.threading, "active_count", lambda: 1)  # else it ends the process
    status, _, err, line = run(capsys, *raising(monkeypatch, KeyboardInterrupt()))
    assert status == 130 and line == "jax-sparse-mla generate: interrupted" and "Traceback" not in err


class Broken:
    def write(self, text):
        raise BrokenPipeError

    flush = write


def test_nobody_reads_what_is_printed(capsys, monkeypatch):
    """At the first line, where an OSError is refused, and at later ones."""
    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(endings, "_drop", lambda *_: None)
    assert main([*SERVED, "--prompt", "hello"]) == 141 and capsys.readouterr().err == ""


# A shell's background processes begin with interrupts ignored.
CODE = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
CODE += "from jax_sparse_mla.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_pipe_and_an_interrupt_of_the_process(tmp_path):
    """`jax-sparse-mla --version | true`, and Ctrl-C while it waits for a prompt; all at once, as imports take long."""
    os.mkfifo(tmp_path / "prompt")
    reads, writes = os.pipe()
    os.close(reads)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse writes at once, and minds no error
    version = [sys.executable, "-c", CODE, "--version"]
    with open("/dev/full", "wb") as full:  # Python would try again when it ends, and print a traceback
        lost = subprocess.Popen(version, stdout=full, stderr=subprocess.PIPE, env=buffered)
    version = subprocess.Popen(version, stdout=writes, stderr=subprocess.PIPE, env=buffered)
    os.close(writes)
    waits = [sys.executable, "-c", CODE, "generate", "--prompt-file", str(tmp_path / "prompt")]
    waiting = subprocess.Popen(waits, stderr=subprocess.PIPE)
    try:
        _, err = version.communicate(timeout=120)
        assert (version.returncode, err) == (141, b"")
        _, err = lost.communicate(timeout=120)
        assert lost.returncode == 2 and err.count(b"\n") == 1 and b"No space left on device" in err
        while waiting.poll() is None:
            try:  # nobody can write to a pipe that nobody reads
                prompt = os.open(tmp_path / "prompt", os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                time.sleep(0.1)
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=120)
        os.close(prompt)
    finally:
        waiting.kill()
    *working, last = err.decode().splitlines()
    assert (waiting.returncode, last) == (130, "jax-sparse-mla generate: interrupted")
    assert all(line.startswith("importing JAX") for line in working)
