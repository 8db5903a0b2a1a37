"""How an attention call becomes part of a program: its scope, its gradient, and its shares on several devices."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.attention.backend import BACKENDS, PHASES
from jax_sparse_mla.attention.gradient import differentiable
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.launch.transforms import KernelCall, shared

# The parts of a program that attend are named: this prefix, the phase, a dot, the backend.
_SCOPE = "sparse_mla_"
# In the place of a backend: a library's attention to all keys, over expanded heads (`serving/deepseek_v32.py`).
EXPANDED = "expanded"
EXPANDED_SCOPE = f"{_SCOPE}prefill.{EXPANDED}"


class Service(NamedTuple):
    """How a call is served; everything that is static.

    Attributes:
      phase, backend: which function is called.
      named: whether the caller or the environment asked for the backend by name.
      softmax_scale, batch_invariant, assume_valid_indices, deterministic_gradient: as in the public functions.
    """

    phase: str
    backend: str
    named: bool
    softmax_scale: float
    batch_invariant: bool = False
    assume_valid_indices: bool = False
    deterministic_gradient: bool = False

    @property
    def name(self) -> str:
        """The public function's name, for errors."""
        return f"{_SCOPE}{self.phase}"

    def scope_of(self, backend: str) -> str:
        """The scope that `calls_of` and profilers find."""
        return f"{self.name}.{backend}"

    def function_of(self, backend: str) -> Any:
        """The backend's function of the call's arrays."""
        function = partial(BACKENDS[backend].function(self.phase), softmax_scale=self.softmax_scale)
        if self.phase == "decode":
            function = partial(function, assume_valid_indices=self.assume_valid_indices)
        return partial(function, batch_invariant=True) if self.batch_invariant else function


def serve(check: ArgumentChecks, service: Service, arguments: tuple) -> tuple[jax.Array, ...]:
    """The results of the backend's function, under `jit`: only there is the platform known that one lowers for."""
    if not sharding.is_sharded(arguments):
        return _traced(*arguments, service=service)
    if service.phase == "decode":
        for name, table in zip(("cache", "extra_cache"), arguments[1]):
            sharding.refuse_sharded(check, name, table.cache)
    else:
        sharding.refuse_sharded(check, "kv", arguments[1])
    return sharding.by_rule(_traced, _RULES[service.phase](*arguments), arguments, service=service)


@partial(jax.jit, static_argnames="service")
def _traced(*arguments: Any, service: Service) -> tuple[jax.Array, ...]:
    rule = _RULES[service.phase](*arguments)
    reference = shared(service.function_of("reference"), rule)

    def plain(*arguments):
        with jax.named_scope(service.scope_of("reference")):
            return reference(*arguments)

    plain.__name__ = service.name  # profilers show it
    if service.backend == "reference":
        return plain(*arguments)
    record = BACKENDS[service.backend]
    call = KernelCall(
        service.function_of(service.backend),
        plain,
        name=service.name,
        rule=rule,
        scope=service.scope_of(service.backend),
        batches=service.phase in record.batches,
        replaceable=not service.named,
    )
    if service.phase in record.gradients:
        call = differentiable(call, service.name, service.softmax_scale, service.deterministic_gradient)
    return call(*arguments)


def _decode_rule(q: jax.Array, tables: tuple[IndexTable, ...], attn_sink: jax.Array | None) -> sharding.PartitionRule:
    """Rows and heads may be cut; every device reads the whole cache."""
    rows, of_q = P("batch", "q_len"), P("batch", "q_len", "heads")
    tables = tuple(IndexTable(P(), rows, None if table.lengths is None else rows) for table in tables)
    return sharding.PartitionRule((of_q, tables, None if attn_sink is None else P("heads")), (of_q, of_q))


def _prefill_rule(
    q: jax.Array, kv: jax.Array, indices: jax.Array, lengths: jax.Array | None, attn_sink: jax.Array | None
) -> sharding.PartitionRule:
    """As `_decode_rule`; every device reads the whole workspace."""
    optional = None if lengths is None else P("rows"), None if attn_sink is None else P("heads")
    return sharding.PartitionRule((P("rows", "heads"), P(), P("rows"), *optional), (P("rows", "heads"),) * 3)


_RULES = {"decode": _decode_rule, "prefill": _prefill_rule}


def calls_of(program: jax.stages.Lowered) -> frozenset[tuple[str, str]]:
    """The attention calls of a lowered program, as (phase, backend): what it runs, whatever was planned.

    >>> calls_of(jax.jit(step).lower(*args))
    frozenset({('decode', 'triton')})
    """
    scopes = rf"{_SCOPE}({'|'.join(PHASES)})\.({'|'.join([*BACKENDS, EXPANDED])})\b"
    return frozenset(re.findall(scopes, program.as_text(debug_info=True)))
