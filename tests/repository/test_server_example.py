"""examples/jax_server.py: what requests get does not depend on who else is served, and nothing leaks or recompiles."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

COMPILING = "PLAIN"  # see conftest.py
PATH = Path(__file__).resolve().parents[2] / "examples" / "jax_server.py"
# (tokens of the prompt, tokens to make, step of arrival): joining, leaving, waiting for a place, several in a chunk.
SIZES = [(300, 6, 0), (40, 12, 0), (520, 4, 3), (7, 9, 6), (130, 5, 8), (64, 3, 9)]


@pytest.fixture(scope="module")
def server_module():
    spec = importlib.util.spec_from_file_location("jax_server", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_requests(module):
    rng = np.random.default_rng(0)
    return [module.Request(rng.integers(0, module.VOCABULARY, n).tolist(), new, step) for n, new, step in SIZES]


def addresses(server):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(server.state[0])]


def test_a_batch_serves_each_request_as_if_it_were_alone(server_module, monkeypatch):
    # Equal to the bit: a kernel that splits a row's keys by what else is in the batch would round its sums otherwise.
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
    # A ratio-4 layer between the others, and one bucket a mode: three programs fewer to compile.
    config = server_module.Config(ratios=(0, 4, 128), decode_buckets=(4,))
    server = server_module.Server(config)
    before, free = addresses(server), (set(server.free_pages), set(server.free_rows))
    together = some_requests(server_module)
    server.serve(together)
    assert [len(r.output) for r in together] == [new for _, new, _ in SIZES]
    # What is made hangs on what was read, and changes from token to token: a wrong key would show.
    assert len({tuple(r.output) for r in together}) == len(SIZES)
    assert all(len(set(r.output)) > 2 for r in together)

    assert addresses(server) == before  # the caches never moved
    assert (set(server.free_pages), set(server.free_rows)) == free  # every page came back
    assert server_module.forward._cache_size() == 2

    alone = some_requests(server_module)
    for request in alone:
        request.arrival = 0
        server.serve([request])  # on the caches that the others left
    assert [r.output for r in alone] == [r.output for r in together]
    assert server_module.forward._cache_size() == 2


def test_requests_that_cannot_be_served_are_refused(server_module):
    server = server_module.Server(dataclasses.replace(server_module.Config(), ratios=(0,)))
    for prompt, new in ([], 3), ([1], 0), ([1] * 1000, 25):
        with pytest.raises(ValueError, match="1024 in all"):
            server.serve([server_module.Request(prompt, new)])
