"""The routed experts' product of DeepSeek-V4-Flash: FP4 and FP8 weights as stored, beside bfloat16 and other libraries.

One product of 256 experts from 4,096 to 2 x 2,048 values, six experts a row. The ceiling is that of FP4: the weights of
the experts that rows go to are read once. tokamax's numbers are int4 with a scale for 128, nearly as many bytes;
DeepGEMM's are FP8, and so are its rows. JAX's `hopper_mixed_type_matmul_mgpu` takes int8 alone and no groups: it is
left out.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import peers
from benchmarks.harness import Case, NotMeasured, Run, Spec, compare
from jax_sparse_mla.serving import moe
from jax_sparse_mla.serving.quantised import Quantised, WeightFormat, multiplied_out
from jax_sparse_mla.serving.tensors import _random_quantised

EXPERTS, TOP, N, K = 256, 6, 4096, 4096
ROWS = 1, 8, 64, 256, 512, 1024, 8192
ALIGNED = 128  # DeepGEMM's rows of an expert begin at a multiple


@functools.cache
def weights(form: WeightFormat) -> Quantised:
    shape = EXPERTS, N, K
    return _random_quantised(jnp.uint32(1), "experts.gate_up_proj", shape, np.dtype(jnp.bfloat16), form)


@functools.cache
def wide() -> jax.Array:
    return multiplied_out(weights(WeightFormat.FP4))


def _product(x: jax.Array, weight: Any, expert: np.ndarray) -> Run:
    """As a layer makes it, of rows sorted by expert."""
    few = len(expert) <= EXPERTS
    which = expert if few else np.bincount(expert, minlength=EXPERTS)
    call = functools.partial(jax.jit(moe._times if few else moe._ragged), x, weight, jnp.asarray(which, jnp.int32))
    return Run(call, "jax")


def _tokamax(x: jax.Array, expert: np.ndarray) -> Callable[[], jax.Array]:
    @functools.cache
    def prepared():
        try:
            tokamax, qwix = map(importlib.import_module, ("tokamax", "qwix"))
        except ImportError as error:
            raise NotMeasured(str(error)) from error
        values = jax.random.randint(jax.random.key(0), (EXPERTS, N, K), -8, 8, jnp.int4).mT
        scales = jnp.ones((EXPERTS, K // 128, N), jnp.bfloat16)
        sizes = jnp.asarray(np.bincount(expert, minlength=EXPERTS), jnp.int32)
        product = functools.partial(tokamax.ragged_dot, implementation="mosaic", preferred_element_type=jnp.bfloat16)
        return jax.jit(product), x, qwix.QArray(values, scales, qtype=jnp.int4), sizes

    def call():
        product, *arguments = prepared()
        return product(*arguments)

    return call


def _deep_gemm(expert: np.ndarray) -> Callable[[], torch.Tensor]:
    @functools.cache
    def prepared():
        product = peers.find("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
        sizes = np.bincount(expert, minlength=EXPERTS)
        padded = -(-sizes // ALIGNED) * ALIGNED
        rows = torch.from_numpy(np.repeat(np.arange(EXPERTS, dtype=np.int32), padded)).cuda()

        def fp8(*shape, scale):
            values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
            return values, torch.ones(scale, device="cuda")

        x = fp8(len(rows), K, scale=(len(rows), K // 128))
        weight = fp8(EXPERTS, N, K, scale=(EXPERTS, N // 128, K // 128))
        out = torch.empty(len(rows), N, device="cuda", dtype=torch.bfloat16)
        return functools.partial(product, x, weight, out, rows)

    return lambda: prepared()()


def _case(rng: np.random.Generator, rows: int) -> Case:
    expert = np.sort(np.concatenate([rng.permutation(EXPERTS)[:TOP] for _ in range(rows)]))
    x = jnp.asarray(0.1 * rng.standard_normal((len(expert), K)), jnp.bfloat16)
    fp4, bf16 = _product(x, weights(WeightFormat.FP4), expert), _product(x, wide(), expert)

    def difference() -> float:
        ours, theirs = (np.asarray(run.call(), np.float32) for run in (fp4, bf16))
        found = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert found < 0.005, found
        return found

    return Case(
        ours={"FP4": fp4, "FP8": _product(x, weights(WeightFormat.FP8), expert)},
        peers={
            "bf16": bf16,
            "tokamax int4": Run(_tokamax(x, expert), "jax"),
            "DeepGEMM": Run(_deep_gemm(expert), "torch"),
        },
        checks={"bf16": difference},
        bytes=round(len(np.unique(expert)) * N * K * (1 / 2 + 1 / 32)) + 2 * len(expert) * (N + K),
        flop=2 * len(expert) * N * K,
    )


def specs() -> Iterator[Spec]:
    for rows in ROWS:
        yield Spec(f"experts {rows} rows", functools.partial(_case, rows=rows))


def main() -> int:
    asked = {"--dry-run", "-h", "--help"} & set(sys.argv)
    if not asked and jax.default_backend() != "gpu":
        print("expert_products times kernels: it needs an NVIDIA GPU; --dry-run lists the cases")
        return 2
    return compare("expert_products", __doc__, specs())
