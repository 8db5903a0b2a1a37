"""The Triton kernels of the hyper-connections against plain JAX: in Triton's interpreter, or on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_mla_torch.launch.executor import executor
from triton_device import tensor

from jax_sparse_mla.serving import hyper_connections, hyper_connections_triton
from jax_sparse_mla.serving.config import HyperConnections
from jax_sparse_mla.serving.hyper_connections import Mixing, with_affine

CONFIG, NORM_EPS = HyperConnections(streams=4, iterations=20, eps=1e-6), 1e-5


def given(rows, hidden, head=False, norm=jnp.float32, scale=1.0):
    """Streams, weights, and what joins the streams, with numbers of very different sizes."""
    keys = iter(jax.random.split(jax.random.key(rows + hidden), 8))
    n, lines = 4, 4 if head else 24
    streams = jax.random.normal(next(keys), (rows, n, hidden)) * jnp.exp2(jnp.arange(n) - 2)[:, None]
    fn = with_affine(
        scale * jax.random.normal(next(keys), (lines, n * hidden)) / hidden**0.5,
        jax.random.normal(next(keys), (lines,)),
        jax.random.normal(next(keys), (1 if head else 3,)),
    )
    norm = jax.random.normal(next(keys), (hidden,)).astype(norm)
    mixing = Mixing(jax.random.uniform(next(keys), (rows, n)), jax.random.uniform(next(keys), (rows, n, n)))
    out = jax.random.normal(next(keys), (rows, hidden), jnp.bfloat16)
    return streams.astype(jnp.bfloat16), fn, norm, (out, mixing)


def compare(found, expected, name, joined=False, fewer_casts=False):
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    # bfloat16 numbers whose sums are made in another order may be rounded to the next one.
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if name in ("streams", "x") else {"rtol": 1e-4, "atol": 1e-6}
    if fewer_casts:
        tolerance = {"rtol": 0.05, "atol": 0.1} if name in ("streams", "x") else {"rtol": 0.02, "atol": 0.02}
    elif joined and name in ("post", "comb"):  # of streams of which some are rounded to the next number
        tolerance = {"rtol": 5e-3, "atol": 1e-4}
    np.testing.assert_allclose(found, expected, err_msg=name, **tolerance)
    if name in ("streams", "x") and not fewer_casts:
        assert np.mean(found != expected) < 0.02, name


@pytest.mark.torch
@pytest.mark.parametrize(
    "rows, hidden, head, joined, norm",
    [
        (1, 256, False, False, jnp.float32),
        (45, 384, False, True, jnp.float32),
        (33, 200, False, True, jnp.bfloat16),
        (7, 256, True, False, jnp.float32),
    ],
)
def test_block_input(rows, hidden, head, joined, norm):
    """Rows and channels that fill no block, with the block before and without it, and the head."""
    streams, fn, norm, before = given(rows, hidden, head, norm, scale=3.0)
    static = {"config": CONFIG, "norm_eps": NORM_EPS}
    expected = hyper_connections.block_input(streams, fn, norm, before if joined else None, **static)
    arrays = [tensor(x) for x in jax.tree.leaves((streams, fn, norm, before if joined else None))]
    constants = {"norm_eps": NORM_EPS, "eps": CONFIG.eps, "iterations": CONFIG.iterations}
    found = hyper_connections_triton.block_input(executor(arrays[0].device), *arrays, **constants)
    names = ["streams"] * joined + ["x"] + ["post", "comb"] * (not head)
    wanted = [*expected[:1] * joined, expected[1], *(expected[2] or ())]
    for name, mine, theirs in zip(names, found, wanted, strict=True):
        compare(mine.float().cpu(), theirs, name, joined)
    if not head:
        np.testing.assert_allclose(found[-1].cpu().sum(1), 1, atol=1e-3)  # of columns, which are divided last


@pytest.mark.torch
def test_weights_are_not_rounded():
    """Sums of products with float32 weights, of which two bfloat16 numbers have 16 bits."""
    streams, fn, _, _ = given(3, 256)
    tensors = [tensor(x) for x in (streams, fn)]
    sums = hyper_connections_triton._mix(executor(tensors[0].device), tensors[0], (None,) * 3, tensors[1])[1]
    wide = np.asarray(streams, np.float64).reshape(3, -1)
    exact, found = wide @ np.asarray(fn[:-1], np.float64).T, sums.double().sum(1).cpu().numpy()
    np.testing.assert_allclose(found[:, :24], exact, rtol=0, atol=4e-7 * np.abs(exact).max())
    np.testing.assert_allclose(found[:, 24], (wide * wide).sum(1), rtol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize("iterations", [1, 2])
def test_few_steps_of_sinkhorn(iterations):
    """So few that each of them shows."""
    streams, fn, norm, _ = given(2, 256, scale=9.0)
    config = HyperConnections(streams=4, iterations=iterations, eps=1e-6)
    expected = hyper_connections.block_input(streams, fn, norm, config=config, norm_eps=NORM_EPS)[2].comb
    tensors = [tensor(x) for x in (streams, fn, norm)]
    constants = {"norm_eps": NORM_EPS, "eps": config.eps, "iterations": iterations}
    found = hyper_connections_triton.block_input(executor(tensors[0].device), *tensors, **constants)[2]
    compare(found.cpu(), expected, "comb")


@pytest.mark.torch
@pytest.mark.parametrize("head", [False, True])
def test_input_of_sums(head):
    """Of many rows XLA makes the sums, of three bfloat16 numbers for each weight."""
    streams, fn, norm, _ = given(9, 384, head, scale=3.0)
    sums = hyper_connections._sums(streams, fn)
    exact = np.asarray(streams, np.float64).reshape(9, -1) @ np.asarray(fn[:-1], np.float64).T
    np.testing.assert_allclose(sums[:, 0, : exact.shape[1]], exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    _, x, mixing = hyper_connections.block_input(streams, fn, norm, config=CONFIG, norm_eps=NORM_EPS)
    arrays = [tensor(x) for x in (streams, fn, norm, sums)]
    constants = {"norm_eps": NORM_EPS, "eps": CONFIG.eps, "iterations": CONFIG.iterations}
    found = hyper_connections_triton.input_of_sums(executor(arrays[0].device), *arrays, **constants)
    for name, mine, theirs in zip(("x", "post", "comb"), found, (x, *(mixing or ()))):
        compare(mine.float().cpu(), theirs, name)


@pytest.mark.torch
def test_join():
    streams, _, _, (out, mixing) = given(5, 300)
    arrays = [tensor(x) for x in jax.tree.leaves((streams, out, mixing))]
    found = hyper_connections_triton.join(executor(arrays[0].device), *arrays)
    compare(found.float().cpu(), hyper_connections.expand_streams(streams, out, mixing), "streams")


@pytest.mark.gpu
@pytest.mark.parametrize("rows, joined", [(1, True), (45, False), (1000, True)])
def test_jax_runs_the_kernels(rows, joined):
    """Rows of 4,096 channels; one of few rows has the same bits in another place and among others."""
    streams, fn, norm, before = given(rows, 4096)
    before = before if joined else None

    def run(streams, fn, norm, before):
        return hyper_connections.block_input(streams, fn, norm, before, config=CONFIG, norm_eps=NORM_EPS)

    program = jax.jit(run).lower(streams, fn, norm, before)
    assert "input_kernel" in program.as_text() and ("mix_kernel" in program.as_text()) == (rows <= 64)
    found = program.compile()(streams, fn, norm, before)
    if rows <= 64:
        last = jax.jit(run)(streams[-1:], fn, norm, jax.tree.map(lambda x: x[-1:], before))
        for whole, alone in zip(jax.tree.leaves(found), jax.tree.leaves(last), strict=True):
            np.testing.assert_array_equal(whole[-1:], alone)
    on_host = jax.device_put((streams, fn, norm, before), jax.devices("cpu")[0])
    # Compiled whole, plain JAX would drop casts to bfloat16.
    expected = jax.tree.leaves(hyper_connections._block_input(*on_host, CONFIG, NORM_EPS))
    for name, mine, theirs in zip(("streams", "x", "post", "comb"), jax.tree.leaves(found), expected, strict=True):
        # XLA joins many rows, and rounds less.
        compare(mine, theirs, name, joined, fewer_casts=rows > 64)
