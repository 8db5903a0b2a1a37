"""examples/jax_server.py: it serves all, reuses the common prefix, and what a request gets is what it gets alone."""

import importlib.util
from pathlib import Path

import pytest

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.request import Request

PATH = Path(__file__).resolve().parents[2] / "examples" / "jax_server.py"


@pytest.mark.long
def test_the_server(capsys, monkeypatch):
    # Equal to the bit: a kernel that splits a row's keys by what else is in the batch would round its sums otherwise.
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
    spec = importlib.util.spec_from_file_location("jax_server", PATH)
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    # Two of the preset's layers, which compile sooner.
    config = CONFIGS["v4"]
    small = {**config, "num_hidden_layers": 2, "layer_types": config["layer_types"][:2], "mlp_layer_types": ["moe"] * 2}
    monkeypatch.setattr(server, "CONFIGS", {"v4": small})
    engine, requests = server.main([])
    out = capsys.readouterr().out
    assert [len(request.output) for request in requests] == [new for _, _, new, _ in server.ARRIVALS]
    assert out.count("tokens read") == len(requests) and "EXTEND" in out and "DECODE" in out
    counters, pool = engine.scheduler.counters, engine.scheduler.pool
    assert counters.finished == len(requests) and counters.reused == 2 * 256  # two begin as the first does
    assert len(pool.pages.free) + len(pool.pages.idle) == pool.num_pages - 1
    programs = [program for program in engine.routes if program.mode is ForwardMode.DECODE]
    for request in requests[:2]:
        engine.scheduler.prefixes.clear()
        alone = Request(request.prompt, request.max_new_tokens)
        engine.run([alone])
        close = min(request.margins) < 0.01  # a step of another size may round otherwise
        assert alone.output == request.output or close
    assert [program for program in engine.routes if program.mode is ForwardMode.DECODE] == programs

    with pytest.raises(ValueError, match="more than max_len 1024"):
        engine.submit(Request([1] * 1000, 25))
