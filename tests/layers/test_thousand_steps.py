"""A thousand decode steps whose requests change: two buckets of rows over the same donated caches.

Each bucket compiles once, no buffer moves, nothing crosses between device and host, no memory is left over, and the
results are those of steps that each wait for the one before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.stack import Stack, decode_layers, fill
from jax_sparse_mla import DEEPSEEK_V4_FLASH, ForwardBatch, ForwardMode

ON_GPU = jax.default_backend() == "gpu"
SPEC = (
    DEEPSEEK_V4_FLASH if ON_GPU else dataclasses.replace(DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=16)
)
STEPS = 1000 if ON_GPU else 60
BUCKETS = 2, 4
LENGTH = 2048 if ON_GPU else 512


@dataclasses.dataclass
class Schedule:
    """What requests do in every step: `pool` says which of them the rows are, `lens` how long those are after it."""

    pool: np.ndarray  # int32 [steps, 4]
    lens: np.ndarray  # int32 [steps, 4]
    rows: list[int]  # each step's bucket

    @classmethod
    def random(cls, seed: int) -> "Schedule":
        """Requests end at random and others take their place; a step has two rows or four, in any order."""
        rng, most = np.random.default_rng(seed), max(BUCKETS)
        length = rng.integers(1, LENGTH // 2, most)
        pool, lens, rows = [], [], []
        for _ in range(STEPS):
            order, count = rng.permutation(most), int(rng.choice(BUCKETS))
            length[order[:count]] += 1
            pool.append(order)
            lens.append(length[order])
            rows.append(count)
            ends = (rng.random(most) < 0.02) | (length >= LENGTH - 1)
            length = np.where(ends, rng.integers(1, LENGTH // 2, most), length)
        return cls(np.asarray(pool, np.int32), np.asarray(lens, np.int32), rows)


def step_of(stack: Stack, count: int):
    """`(state, rows, params, tables, pool, lens) -> state`, state `(caches, number of steps, sums of outputs)`."""

    def step(state, rows, params, tables, pool, lens):
        caches, number, sums = state
        requests, seq_lens = (jax.lax.dynamic_index_in_dim(x, number, keepdims=False)[:count] for x in (pool, lens))
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=stack.max_len,
            req_pool_indices=requests,
            seq_lens=seq_lens,
            out_cache_loc=tables.req_to_token[requests, seq_lens - 1],
        )
        caches, out = decode_layers(stack, caches, rows, params, batch, tables)
        return caches, number + 1, sums.at[requests].add(out.astype(jnp.float32).sum((1, 2)))

    return jax.jit(step, donate_argnums=0)


def addresses(tree) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def bytes_in_use() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
    return stats.get("bytes_in_use", 0)


@pytest.mark.long
def test_a_thousand_steps_of_requests_that_come_and_go():
    stack = Stack(spec=SPEC, ratios=(0, 4, 128, 4), batch=max(BUCKETS), max_len=LENGTH, window_pages=LENGTH // 256)
    params, tables = stack.params(), stack.tables()
    rows = {count: stack.rows(count) for count in BUCKETS}
    schedule = Schedule.random(0)
    pool, lens = jnp.asarray(schedule.pool), jnp.asarray(schedule.lens)
    steps = {count: step_of(stack, count) for count in BUCKETS}
    state = fill(stack.empty_caches()), jnp.int32(0), jnp.zeros(max(BUCKETS))
    for count in BUCKETS:  # compile
        caches, _, sums = steps[count](state, rows[count], params, tables, pool, lens)
        state = jax.block_until_ready((caches, jnp.int32(0), jnp.zeros_like(sums)))
    first = jax.tree.map(jnp.copy, state)
    before, live, used = addresses(state), len(jax.live_arrays()), bytes_in_use()
    with jax.transfer_guard("disallow"):
        for count in schedule.rows:
            state = steps[count](state, rows[count], params, tables, pool, lens)
    jax.block_until_ready(state)
    assert all(step._cache_size() == 1 for step in steps.values()), "a bucket compiles once"
    assert addresses(state) == before, "every buffer stays where it is"
    assert len(jax.live_arrays()) == live and bytes_in_use() <= used, "nothing is left over"
    assert int(state[1]) == STEPS
    sums = np.asarray(state[2])
    assert np.isfinite(sums).all() and sums.all()
    state = first
    for count in schedule.rows:
        state = jax.block_until_ready(steps[count](state, rows[count], params, tables, pool, lens))
    np.testing.assert_array_equal(state[2], sums)


def test_requests_change_in_every_way():
    """The schedule has what the test is about: new requests, both buckets, a row of another request than before."""
    schedule = Schedule.random(0)
    assert set(schedule.rows) == set(BUCKETS)
    assert (schedule.pool[1:] != schedule.pool[:-1]).any()
    order = np.argsort(schedule.pool, axis=1)
    by_request = np.take_along_axis(schedule.lens, order, axis=1)
    assert (by_request[1:] < by_request[:-1]).any(), "a new request begins shorter"
    assert (by_request[1:] == by_request[:-1]).any(), "one waits while others step"
    assert by_request.min() >= 1 and by_request.max() < LENGTH
