"""A good call of every public array function, by keyword: what contract and bad-input tests start from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import metadata_cases
import numpy as np
from metadata_cases import INT_MAX, INT_MIN, i32  # noqa: F401

import jax_sparse_mla as mla

TINY_V4 = dataclasses.replace(metadata_cases.TINY_V4, num_heads=2)
TINY_V32 = dataclasses.replace(metadata_cases.TINY_V32, num_heads=2)
PAGE, PAGES, MAX_LEN, POOL = 16, 6, 32, 96
DEVICE = mla.DeviceInfo("cuda", (9, 0), 132, 232_448)


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def full_cache(layout=mla.KVLayout.V4_FP8, pages=PAGES, page_size=PAGE, seed=1):
    """A cache that holds a row of its own in every slot."""
    cache = mla.PagedKV.zeros(layout, pages, page_size)
    return mla.write_kv(cache, i32(range(cache.num_slots)), normal(cache.num_slots, layout.qk_dim, seed=seed))


def index_cache(pages=4, page_size=8, seed=2):
    cache = jnp.zeros((pages, page_size * 132), jnp.uint8)
    return mla.write_index_k(cache, i32(range(pages * page_size)), normal(pages * page_size, 128, seed=seed))


def tables():
    """Two requests of 32 tokens on pages 1-4 and their window slots, in another order."""
    to_swa = np.append(np.random.default_rng(3).permutation(POOL), -1)
    return mla.RequestTables(req_to_token=i32(np.arange(16, 80).reshape(2, MAX_LEN)), full_to_swa=i32(to_swa))


def batch(mode=mla.ForwardMode.DECODE, **changes):
    """Requests of 9 and 20 tokens: one query row each, or 3 and 2 of them (EXTEND)."""
    fields = dict(
        mode=mode, max_seq_len=MAX_LEN, req_pool_indices=i32([0, 1]), seq_lens=i32([9, 20]), out_cache_loc=i32([24, 67])
    )
    if mode is mla.ForwardMode.EXTEND:
        fields |= {"out_cache_loc": i32([22, 23, 24, 66, 67, 0]), "extend_lens": i32([3, 2])}
    return mla.ForwardBatch(**(fields | changes))


def plan(ratio=4):
    step = batch(mla.ForwardMode.EXTEND)
    capacities = {"swa_capacity": 16, "compressed_capacity": 8}
    return mla.build_prefill_plan(TINY_V4, step, tables(), compress_ratio=ratio, **capacities)


def _decode():
    return (
        dict(q=normal(2, 1, 2, 512), cache=full_cache(), indices=i32([[[1, 5, -1, 90]], [[2, 2, 40, 7]]]))
        | dict(softmax_scale=512**-0.5, topk_length=i32([4, 3]), extra_cache=full_cache(page_size=4, seed=4))
        | dict(extra_indices=i32([[[0, 23]], [[-1, 3]]]), extra_topk_length=i32([[2], [1]]))
        | dict(attn_sink=normal(2, dtype=jnp.float32))
    )


def _prefill():
    return (
        dict(q=normal(3, 2, 576), kv=normal(20, 576, seed=5))
        | dict(indices=i32([[1, 19, -1], [0, 0, 3], [-1, -1, -1]]), softmax_scale=0.1)
        | dict(topk_length=i32([3, 2, 3]), attn_sink=normal(2, dtype=jnp.float32))
    )


def _extend():
    return (
        dict(q=normal(6, 2, 512), plan=plan(), swa_cache=full_cache())
        | dict(compressed_cache=full_cache(page_size=4, seed=4))
        | dict(topk_positions=i32(np.arange(36).reshape(6, 6) % 5), softmax_scale=512**-0.5)
        | dict(attn_sink=normal(2, dtype=jnp.float32), workspace=jnp.zeros((30, 512), jnp.bfloat16))
    )


def _topk():
    return {"logits": normal(3, 10, dtype=jnp.float32), "lengths": i32([2, 10, 7]), "topk": 4}


def _compress():
    return (
        dict(state=mla.CompressorState.zeros(3, ratio=4, head_dim=16), kv=normal(8, 32))
        | dict(score=normal(8, 32, seed=6), positions=i32([0, 1, 2, 3, 10, 11, 12, -1]))
        | dict(req_rows=i32([0, 0, 0, 0, 2, 2, 2, 0]), query_start_loc=i32([0, 4, 7]))
        | dict(ape=normal(4, 32, dtype=jnp.float32), norm_weight=jnp.ones(16), inv_freq=jnp.ones(4), ratio=4)
    )


# What builds the keyword arguments of each call.
_BUILD = {
    "write_kv": lambda: {"cache": full_cache(), "slots": i32([0, 95, -1]), "kv": normal(3, 512, seed=7)},
    "write_kv V3.2": lambda: {
        "cache": full_cache(mla.KVLayout.V32_FP8),
        "slots": i32([0, 95, -1]),
        "kv": normal(3, 576, dtype=jnp.float32, seed=7),
    },
    "gather_kv": lambda: {"cache": full_cache(), "slots": i32([0, 95, -1])},
    "dequantize_kv": lambda: {"cache": full_cache(mla.KVLayout.V32_BF16)},
    "split_pages": lambda: dict(
        cache=full_cache(), page_size=4, slots=i32([3, 40]), out=full_cache(pages=4 * PAGES, page_size=4, seed=8)
    ),
    "split_pages all": lambda: {"cache": full_cache(), "page_size": 8},
    "quantize_ue8m0": lambda: {"x": normal(3, 128), "group": 64},
    "sparse_mla_decode": _decode,
    "sparse_mla_prefill": _prefill,
    "sparse_mla_extend": _extend,
    "build_prefill_plan": lambda: (
        dict(spec=TINY_V4, batch=batch(mla.ForwardMode.EXTEND), tables=tables(), compress_ratio=4)
        | dict(swa_capacity=16, compressed_capacity=8)
    ),
    "merge_attention": lambda: {
        "outs": [normal(3, 2, 16), normal(3, 2, 16, seed=9)],
        "lses": [normal(3, 2, dtype=jnp.float32), normal(3, 2, dtype=jnp.float32, seed=9)],
    },
    "merge_attention stacked": lambda: {
        "outs": normal(2, 3, 2, 16),
        "lses": normal(2, 3, 2, dtype=jnp.float32),
    },
    "apply_attn_sink": lambda: {
        "out": normal(3, 2, 16),
        "lse": normal(3, 2, dtype=jnp.float32),
        "attn_sink": normal(2, dtype=jnp.float32),
    },
    "combine_swa_extra_indices": lambda: (
        dict(swa_indices=i32([[0, 4, -1], [3, 2, 1]]), swa_lengths=i32([3, 2]))
        | dict(extra_indices=i32([[7, -1], [0, 1]]), extra_lengths=i32([2, 1]), num_swa_rows=5)
    ),
    "combine_topk_swa_indices": lambda: (
        dict(topk_indices=i32([[0, 1], [1, 0], [0, -1]]), query_start_loc=i32([0, 2, 3]))
        | dict(query_pos=i32([8, 9, 4]), seq_lens=i32([10, 5]), gather_lens=i32([6, 5]))
        | dict(compressed_base=i32([0, 2]), swa_base=i32([3, 9]), window=5, compress_ratio=4, topk=2)
    ),
    "swa_slots": lambda: (
        dict(positions=i32([8, 19, -1]), req_rows=i32([0, 1, 0]), req_to_token=tables().req_to_token)
        | dict(full_to_swa=tables().full_to_swa, window=5)
    ),
    "swa_gather_plan": lambda: (
        dict(seq_lens=i32([9, 20]), extend_lens=i32([3, 2]), req_rows=i32([0, 1]))
        | dict(req_to_token=tables().req_to_token, full_to_swa=tables().full_to_swa, window=5, capacity=16)
    ),
    "topk_positions": lambda: {**_topk(), "row_starts": i32([0, 0, 3])},
    "topk_transform": lambda: (
        _topk()
        | dict(method=mla.TopkTransform.PAGED, page_table=i32([[3, 1], [2, 9]]), page_size=8)
        | dict(row_to_request=i32([0, 1, 1]), row_starts=i32([0, 0, 3]))
    ),
    "topk_transform ragged": lambda: {
        **_topk(),
        "method": mla.TopkTransform.RAGGED,
        "topk_indices_offset": i32([0, 2, 12]),
    },
    "build_v4_metadata": lambda: {"spec": TINY_V4, "batch": batch(), "tables": tables()},
    "build_v32_metadata": lambda: (
        dict(spec=TINY_V32, batch=batch(mla.ForwardMode.EXTEND), tables=tables(), fp8_kv_cache=True)
        | dict(prefill_backend="flashmla_sparse")
    ),
    "draft_step_batch": lambda: dict(
        batch=batch(out_cache_loc=i32(range(12))), step=1, num_steps=3, topk=2, shift_seq_lens=True
    ),
    "flashmla_schedule": lambda: dict(
        topk_length=i32([1, 128]), batch=2, topk=128, extra_topk=64, extra_topk_length=i32([0, 64]), num_sm_parts=3
    ),
    "paged_mqa_schedule": lambda: {"context_lens": i32([1, 700]), "num_sms": 3, "split_kv": 256},
    "index_logits": lambda: (
        dict(q=normal(2, 3, 128), weights=normal(2, 3, dtype=jnp.float32), index_cache=index_cache())
        | dict(page_table=i32([[0, 3], [2, -1]]), lengths=i32([9, 16]))
    ),
    "index_topk": lambda: (
        dict(q=normal(2, 3, 128), weights=normal(2, 3, dtype=jnp.float32), index_cache=index_cache())
        | dict(page_table=i32([[0, 3], [2, -1]]), lengths=i32([9, 16]), topk=4, method=mla.TopkTransform.PAGED)
        | dict(kv_page_table=i32([[0, 3], [2, -1]]), page_size=8)
    ),
    "write_index_k": lambda: dict(index_cache=index_cache(), slots=i32([0, 31, -1]), k=normal(3, 128, seed=7)),
    "compress_kv": _compress,
}


@functools.cache
def _built(name):
    return _BUILD[name]()


def _good(name):
    """Arguments of the reader's own; the arrays among them are made once, since making some compiles a program."""
    return {key: list(value) if isinstance(value, list) else value for key, value in _built(name).items()}


# Name -> what returns its keyword arguments; a variant of a call stands behind a space.
GOOD = {name: functools.partial(_good, name) for name in _BUILD}


def function_of(name):
    return getattr(mla, name.split()[0])


def is_array(x):
    return isinstance(x, (jax.Array, np.ndarray))


def array_paths(kwargs):
    """(path, array) of every array argument, fields of dataclasses and entries of sequences included."""
    found = []

    def visit(path, value):
        if is_array(value):
            found.append((path, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                visit(f"{path}.{field.name}", getattr(value, field.name))
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                visit(f"{path}[{i}]", entry)

    for key, value in kwargs.items():
        visit(key, value)
    return found


def replaced(kwargs, path, new):
    """`kwargs` with what stands at `path` ("batch.seq_lens", "outs[0]") replaced by `new`."""
    head, dot, rest = path.partition(".")
    if dot:
        inner = dataclasses.replace(kwargs[head], **{rest: new})
        return {**kwargs, head: inner}
    if head.endswith("]"):
        head, index = head[:-1].split("[")
        entries = list(kwargs[head])
        entries[int(index)] = new
        return {**kwargs, head: entries}
    return {**kwargs, head: new}


@functools.cache
def shapes(name):
    """Path -> shape and dtype of every array argument of a call; nothing is computed."""
    return jax.eval_shape(lambda: dict(array_paths(_BUILD[name]())))
