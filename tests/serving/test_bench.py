"""`jax-sparse-mla bench`: what it measures, what it prints and writes, and what it refuses."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from jax_sparse_mla.cli import main
from jax_sparse_mla.serving import bench
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.presets import BENCH_CONFIGS, CONFIGS
from jax_sparse_mla.serving.scheduler import EngineOptions, Scheduler

# One layer with experts, so that a program compiles in seconds, and few selected tokens, so that it runs in one.
TINY = {**CONFIGS["v32"], "num_hidden_layers": 1, "index_topk": 64, "first_k_dense_replace": 0, "hidden_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "index_n_heads": 2}  # fmt: skip
CONTEXT, REQUESTS, NEW = 100, 2, 5


@pytest.fixture(autouse=True)
def environment(monkeypatch, quick_collections):
    """The command sets a variable, which processes of later tests must not inherit; it collects garbage."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")


@pytest.fixture
def tiny(monkeypatch):
    """The preset v32 is tiny; the user's cache of programs stays as it is."""
    monkeypatch.setattr("jax_sparse_mla.serving.presets.BENCH_CONFIGS", {**BENCH_CONFIGS, "v32": TINY})
    monkeypatch.setattr("jax_sparse_mla.cli.generate.keep_programs", lambda: None)
    monkeypatch.setattr(bench, "PREFILLS", 1)


def run(capsys, *args):
    status = main(["bench", *map(str, args)])
    return status, *capsys.readouterr()


@pytest.mark.long
def test_the_command(capsys, tiny, monkeypatch, tmp_path):
    """A case, and one whose caches are larger than the device."""
    model = Model.from_config(TINY)
    caches = jax.eval_shape(lambda: model.new_caches(num_pages=1000, num_swa_pages=1, max_requests=1))
    monkeypatch.setattr(bench, "device_memory", lambda: bench.weight_bytes(model) + bench.size_of(caches))
    # Stands for CUPTI, so that the profiled steps run here too.
    monkeypatch.setattr(bench, "gpu_ms", lambda run, steps: (run(), float(steps))[1])
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    drawn = ["--plot", plot] if importlib.util.find_spec("matplotlib") else []
    sizes = ["--contexts", CONTEXT, "--requests", f"{REQUESTS},10000", "--new-tokens", NEW]
    status, out, err = run(capsys, "--preset", "v32", *sizes, "--json", file, *drawn)
    assert status == 0 and not err
    measured = json.loads(file.read_text())
    row, too_large = measured["rows"]
    assert (row["requests"], row["context"], row["problem"]) == (REQUESTS, CONTEXT, None)
    assert row["first_token_ms"]["p50"] > 0
    assert 0 < row["token_ms"]["p50"] <= row["token_ms"]["p90"] <= row["token_ms"]["p99"]
    assert row["tokens_per_s"] == pytest.approx(REQUESTS / row["step_ms"] * 1e3)
    assert row["attention_ms"] > 0 and row["step_gpu_ms"] == bench.PROFILED and row["attention_share"] == 1
    assert too_large["problem"].startswith("does not fit") and too_large["token_ms"] is None
    assert f"{row['tokens_per_s']:,.1f}" in out and too_large["problem"] in out
    if drawn:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_requests_opened_unread_decode_behind_their_context():
    """Whatever the model: the tables of host and device agree, pages are filled, and steps go on from the context."""
    model = Model.from_config(TINY)
    engine = Engine(model, model.init_params(0), EngineOptions(max_batch=REQUESTS, max_len=CONTEXT + 8))
    bench.open_unread(engine, REQUESTS, CONTEXT, 8, seed=0)
    pool, requests = engine.scheduler.pool, list(engine.scheduler.running)
    np.testing.assert_array_equal(engine.state.tables.req_to_token, pool.req_to_token)
    assert all((pool.req_to_token[request.row, :CONTEXT] > 0).all() for request in requests)
    assert np.asarray(engine.state.caches.kv.data).any(axis=1).all()
    plan = engine.scheduler.plan()
    assert plan.starts.tolist() == [CONTEXT] * REQUESTS and plan.counts.tolist() == [1] * REQUESTS
    assert plan.tokens.tolist() == [request.output[0] for request in requests]


@pytest.mark.long
def test_requests_opened_unread_take_different_tokens():
    model = Model.from_config(TINY)
    engine = Engine(model, model.init_params(0), EngineOptions(max_batch=REQUESTS, max_len=CONTEXT + 8))
    bench.open_unread(engine, REQUESTS, CONTEXT, 8, seed=0)
    requests = list(engine.scheduler.running)
    while not engine.idle:
        engine.step()
    assert len({token for request in requests for token in request.output}) > 4 * REQUESTS


def test_a_window_is_mapped_behind_a_long_context():
    """V4's window has far fewer pages than a context: each page that it leaves serves again."""
    spec, context = Model.from_config(CONFIGS["v4"]).spec, 16 * 256 + 3
    scheduler = Scheduler(spec, EngineOptions(max_batch=2, max_len=context + 8), 256)
    for _ in range(2):
        bench.map_pages(scheduler.pool, scheduler.pool.open(), context)
    window = np.arange(context - spec.window, context)
    slots = scheduler.pool.full_to_swa[scheduler.pool.req_to_token[:, window]]
    assert (slots > 0).all() and len(np.unique(slots)) == slots.size


def test_percentiles():
    values = np.random.default_rng(0).permutation(101) / 1e3
    assert bench.Percentiles.of(values) == bench.Percentiles(p50=50, p90=pytest.approx(90), p99=pytest.approx(99))
    assert bench.Percentiles.of([0.002]) == bench.Percentiles(2, 2, 2)


def test_busy_time_counts_what_overlaps_once():
    assert bench.busy([(30, 40), (0, 10), (5, 12), (6, 7)]) == 22
    assert bench.busy([]) == 0


def test_the_share_is_of_gpu_time_where_it_is_known():
    row = bench.Row(requests=1, context=1, step_ms=4.0, attention_ms=1.0)
    assert row.attention_share == 0.25
    row.step_gpu_ms, row.attention_gpu_ms = 2.0, 1.0
    assert row.attention_share == 0.5


def test_weights_larger_than_the_device_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(bench, "device_memory", lambda: 20 << 30)
    status, out, err = run(capsys, "--preset", "v4-flash-slice")
    assert status == 2 and not out
    assert "51.1 GiB" in err and "20.0 GiB" in err


def test_bad_arguments(capsys, tmp_path, monkeypatch):
    for args in (["--requests", "1,0"], ["--contexts", ""], ["--preset", "v5"], ["--new-tokens", "0"]):
        with pytest.raises(SystemExit) as exit_:
            main(["bench", *args])
        assert exit_.value.code == 2
    assert run(capsys, "--json", tmp_path / "missing" / "file.json")[0] == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "--plot", tmp_path / "plot.png")
    assert status == 2 and "matplotlib" in err


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def fail(message):
        raise jax.errors.JaxRuntimeError(message)

    assert bench._fitting(lambda: fail("RESOURCE_EXHAUSTED: out of memory"))[1].startswith("does not fit")
    with pytest.raises(jax.errors.JaxRuntimeError):
        bench._fitting(lambda: fail("INTERNAL: a kernel failed"))
