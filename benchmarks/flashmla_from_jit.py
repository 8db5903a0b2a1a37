"""What FlashMLA's way through XLA adds to its call from torch, at the shapes of `benchmarks.ops.attention`.

    python -m benchmarks.flashmla_from_jit

prints for each shape: FlashMLA's attention kernels (split and combine, or prefill) within a JAX call and within
torch's call, by CUPTI with the L2 flushed; beside them the sanitiser and the copies of the results; and, for one
shape, the host's time per call. Writes flashmla_from_jit.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops import attention
from benchmarks.record import environment, results_folder, write_json
from benchmarks.timing import Run, Timer, host_time
from jax_sparse_mla import sparse_mla_decode

MEASUREMENTS = 5
CHAINED = 64  # calls in one program


def parts_of(timer: Timer) -> dict[str, float]:
    """Microseconds of the last call's device operations, by kind; attention from split's start to combine's end."""
    parts = {"sanitise": 0.0, "copies": 0.0, "other": 0.0}
    kernels = []
    for operation in timer.operations:
        name = operation.name.lower()
        if any(word in name for word in ("splitkv", "combine", "sparse_attn")):
            kernels.append(operation)
        elif "sanitise" in name:
            parts["sanitise"] += operation.duration
        else:
            parts["copies" if "memcpy" in name or "copy" in name else "other"] += operation.duration
    parts["attention"] = max(o.start + o.duration for o in kernels) - min(o.start for o in kernels)
    return parts


def median_parts(timer: Timer, run: Run) -> dict[str, float]:
    """Each part's median over several measurements, and that of the whole call's span."""
    rows = []
    for _ in range(MEASUREMENTS):
        span = timer(run)
        rows.append(parts_of(timer) | {"call": span})
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def chained_host_time(shape: attention.Decode) -> float:
    """Microseconds of the host per decode call, many of them in one jitted program: no Python between them.

    What a call costs an engine whose step is one program: the custom call, the operator in it and its launches.
    """
    arrays = attention.decode_arrays(np.random.default_rng(0), shape)

    @jax.jit
    def chain(arrays):
        q = arrays["q"]
        options = {"softmax_scale": shape.scale, "assume_valid_indices": True, "backend": "flashmla"}
        for _ in range(CHAINED):
            out, _ = sparse_mla_decode(**arrays | {"q": q}, **options)
            q = jnp.concatenate([out, q[..., 512:]], -1)
        return q

    return round(host_time(Run(lambda: chain(arrays), "jax"), calls=1) / CHAINED, 1)


def main() -> None:
    timer, rows, torch_host = Timer(9), [], None
    print("us: attention kernels from jit, from torch, torch / jit; sanitiser, copies, other; the whole call from jit")
    for case in attention.cases(np.random.default_rng(0)):
        if "flashmla" not in case.ours:
            raise SystemExit("FlashMLA is not installed here")
        theirs = case.peers["flash_mla"]
        row = {
            "case": case.name,
            "jit": median_parts(timer, case.ours["flashmla"]),
            "torch": median_parts(timer, theirs),
        }
        torch_host = torch_host or host_time(theirs, calls=16)
        rows.append(row)
        a, b = row["jit"], row["torch"]["attention"]
        print(
            f"{case.name:44} {a['attention']:8.1f} {b:8.1f} {b / a['attention']:6.3f}  sanitise {a['sanitise']:5.1f} "
            f"copies {a['copies']:6.1f} other {a['other']:5.1f} call {a['call']:8.1f}",
            flush=True,
        )
    host = {"jit": chained_host_time(attention.DECODES[0]), "torch": torch_host}
    print(f"host per call, {attention.DECODES[0].name}: {host['jit']} us in one program, {host['torch']} us from torch")
    write_json(results_folder() / "flashmla_from_jit.json", environment() | {"host_us": host, "rows": rows})


if __name__ == "__main__":
    main()
