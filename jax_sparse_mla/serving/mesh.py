"""Serves requests over a mesh of devices: requests over one axis, heads and experts over the other.

Each share of the requests has pages, tables and a scheduler of its own, as if it had an engine of its own; its devices
have the whole caches, since all heads read the same keys, or share their pages (`EngineOptions.context_parallel`). A
step is one program for all shares.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_sparse_mla.layers import V4LayerParams
from jax_sparse_mla.metadata import RequestTables
from jax_sparse_mla.serving import files
from jax_sparse_mla.serving import step as steps
from jax_sparse_mla.serving.checkpoint import from_named_arrays, init_params
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.memory import bytes_of_a_device, check_memory, size_of
from jax_sparse_mla.serving.model import Caches, Draft, Model, Params, read_folder
from jax_sparse_mla.serving.params import LayerParams, LayerWeights
from jax_sparse_mla.serving.quantised import JoinedRows, Quantised, join_rows, multiplied_out
from jax_sparse_mla.serving.request import Logprob, Request
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import Counters, EngineOptions, OfEach, Scheduler, StepPlan
from jax_sparse_mla.serving.step import Program, Result, State

# The axes of the mesh.
REQUESTS, HEADS = "data", "model"
_OF_ROWS = P(None, REQUESTS)  # `[layers that select, rows, k]`

# The dimension of a parameter, by name and rank, that is cut over heads, output groups or experts.
# All others are whole.
_CUT = {
    ("q_b", 2): 0,
    ("attn_sink", 1): 0,
    ("o_a", 3): 0,
    ("o_b", 2): 1,
    ("k_up", 3): 0,
    ("v_up", 3): 0,
    ("o_proj", 2): 1,
    ("gate_up", 3): 0,  # of the experts; those of a dense MLP have two dimensions
    ("down", 3): 0,
}


def new_mesh(shares: int, devices: int) -> Mesh:
    """A mesh of the first `shares * devices` devices: shares of the requests, and devices that share heads and experts.

    With several processes it has all their devices, in the order of the processes.

    Raises:
      ValueError: there are fewer, or with several processes more.
    """
    wanted, have = shares * devices, jax.device_count()
    if wanted > have or (wanted < have and jax.process_count() > 1):
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        tried = f"; XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes as many of a CPU"
        tried = tried if jax.default_backend() == "cpu" and jax.process_count() == 1 else ""
        raise ValueError(f"a mesh of {shares}x{devices} takes {wanted} devices, JAX has {have}{processes}{tried}")
    return Mesh(np.array(jax.devices()[:wanted]).reshape(shares, devices), (REQUESTS, HEADS))


def parameter_specs(params: Params, mesh: Mesh) -> Any:
    """The PartitionSpec of each parameter that `cut_model` places: whole on every device if one has all heads."""
    n = mesh.shape[HEADS]

    def spec(path, x):
        dim = _cut_axis(path, x) if n > 1 and _is_shareable(path, x, n) else None
        # Of a quantised weight, values and scales are cut alike.
        return jax.tree.map(lambda _: P() if dim is None else P(*dim * [None], HEADS), x)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=_is_weight)


def _cut_axis(path: tuple, x: Any) -> int | None:
    """The dimension of a parameter that is cut, None: it is whole."""
    return _CUT.get((getattr(path[-1], "name", None), x.ndim))


def _is_shareable(path: tuple, x: Any, n: int) -> bool:
    """Whether n devices can share a parameter as it is; a quantised weight that they cannot is multiplied out."""
    dim = _cut_axis(path, x) if isinstance(x, Quantised) else None
    return dim is None or x.divides(dim, n)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Quantised)


def cut_model(model: Model, params: Params, mesh: Mesh) -> tuple[Model, Params]:
    """The model as each device of the mesh sees it, and its parameters placed on the devices: for `MeshEngine`.

    Args:
      model, params: whole; numpy arrays or arrays on one device.
      mesh: with the axes REQUESTS and HEADS, and `AxisType.Auto`.

    Raises:
      ValueError: other axes, or heads, output groups or experts that the devices cannot share evenly; a model with
        linear attention, whose heads no device shares.
    """
    return model_of_a_device(model, mesh), _placed(model, params, mesh)


def init_cut_params(
    model: Model, seed: int, mesh: Mesh, dtype: Any = jnp.bfloat16, *, as_stored: bool = False
) -> tuple[Model, Params]:
    """As `cut_model` with `model.init_params(seed, dtype)`, but each device makes its own part; none has the whole."""
    device_model = model_of_a_device(model, mesh)  # refuses what cannot be cut
    shardings = functools.partial(_shardings, mesh=mesh)
    params = init_params(model.config, seed, dtype, as_stored=as_stored, shardings=shardings)
    return device_model, _placed(model, params, mesh)


def load_cut(
    folder: str | os.PathLike[str], mesh: Mesh, *, draft_layer: bool = True, as_stored: bool = True
) -> tuple[Model, Params]:
    """As `cut_model` with what `load` returns, but layer by layer: the host reads a layer and gives each device its own
    part. No device has a weight whole that is cut, and the host has room for a layer, the embedding and the logits'
    weights. Where JAX was started without a CPU, the default device stands for the host.

    Raises:
      FileNotFoundError, ValueError: what `load` and `cut_model` raise; a device's part of the weights does not fit it.
    """
    config, arrays = read_folder(folder)
    model, n = Model(config), mesh.shape.get(HEADS, 1)
    device_model = model_of_a_device(model, mesh)  # refuses what cannot be cut

    def place(layer: LayerParams) -> LayerParams:
        weights = _in_pieces(model, layer.weights, n)
        return dataclasses.replace(layer, weights=jax.device_put(weights, _shardings(weights, mesh)))

    options = {"draft_layer": draft_layer, "as_stored": as_stored}
    with files.named(folder):
        return device_model, _put(model, from_named_arrays(config, arrays, place=place, devices=n, **options), mesh)


def model_of_a_device(model: Model, mesh: Mesh) -> Model:
    """The model as each device of the mesh sees it; raises what `cut_model` raises."""
    if set(mesh.axis_names) != {REQUESTS, HEADS}:
        raise ValueError(f"cut_model: the mesh must have the axes {REQUESTS} and {HEADS}, got {mesh.axis_names}")
    n = mesh.shape[HEADS]
    if n == 1:
        return model
    config = model.config
    if model.is_recurrent:
        raise ValueError(
            f"cut_model: {n} devices cannot share the heads of {config.spec.name}, whose linear attention is not cut; "
            f"give the mesh one device over {HEADS}"
        )
    for name, count in config.shared_counts.items():
        if count % n:
            raise ValueError(f"cut_model: {n} devices cannot share {count} {name} evenly")
    return Model(config.cut(n, HEADS))


def _shardings(params: Params, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(params, mesh))


def _placed(model: Model, params: Params, mesh: Mesh) -> Params:
    """Parameters on their devices, from arrays of any place; any pytree where heads are not cut."""
    if (n := mesh.shape[HEADS]) > 1:
        params = dataclasses.replace(params, layers=[_in_pieces(model, weights, n) for weights in params.layers])

        def in_pieces(x: Any) -> Any:  # the draft layer, or the stages of a drafter
            is_layer = isinstance(x, LayerParams)
            return dataclasses.replace(x, weights=_in_pieces(model, x.weights, n)) if is_layer else x

        draft = jax.tree.map(in_pieces, params.draft, is_leaf=lambda x: isinstance(x, LayerParams))
        params = dataclasses.replace(params, draft=draft)
    return _put(model, params, mesh)


def _in_pieces(model: Model, weights: LayerWeights, n: int) -> LayerWeights:
    """A layer's weights, as the specs cut them for n devices: each device's part in one piece.

    Rows of the queries' heads are followed by those of the indexer, which every device has whole. A quantised weight
    whose scales the devices cannot share is multiplied out.
    """
    if n == 1:
        return weights
    whole, rows = weights.attention.q_b, model.spec.num_heads * model.config.query_dim
    whole = multiplied_out(whole) if isinstance(whole, JoinedRows) else whole
    part = whole.part if isinstance(whole, Quantised) else lambda *of: whole[slice(*of)]
    index = [part(rows, whole.shape[0])] if rows < whole.shape[0] else []
    heads = [part(rows // n * i, rows // n * (i + 1)) for i in range(n)]
    q_b = join_rows([x for of_device in heads for x in (of_device, *index)])
    weights = dataclasses.replace(weights, attention=dataclasses.replace(weights.attention, q_b=q_b))

    def shareable(path: tuple, x: Any) -> Any:
        return x if _is_shareable(path, x, n) else multiplied_out(x)

    return jax.tree_util.tree_map_with_path(shareable, weights, is_leaf=_is_weight)


def _put(model: Model, params: Params, mesh: Mesh) -> Params:
    """Parameters whose layers are in pieces, on their devices. The sinks of several layers are one array."""
    n = mesh.shape[HEADS]

    def sinks(of_ratio: V4LayerParams) -> V4LayerParams:
        by_layer = of_ratio.attn_sink.reshape(of_ratio.num_layers, n, -1)
        return dataclasses.replace(of_ratio, attn_sink=jnp.swapaxes(by_layer, 0, 1).reshape(-1))

    if n > 1 and model.spec.has_attn_sink:
        attention = {ratio: sinks(of_ratio) for ratio, of_ratio in params.attention.items()}
        params = dataclasses.replace(params, attention=attention)
    return jax.device_put(params, _shardings(params, mesh))


@dataclasses.dataclass
class JointPlan(StepPlan):
    """A step of all shares: the arrays of `StepPlan` one share's after the other's. Rows count within a share.

    An entry of `restored` and `kept` has at most one (from, to) of each share, (0, 0) where a share has none.
    """

    parts: Sequence[StepPlan | None] = ()  # each share's; None: it has no step, or one of another mode, which waits

    @classmethod
    def of(cls, parts: Sequence[StepPlan | None]) -> JointPlan:
        plans = [part for part in parts if part is not None]

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(plan, name) for plan in plans])

        def pairs(name: str) -> list:
            return list(zip_longest(*(getattr(part, name) if part else [] for part in parts), fillvalue=(0, 0)))

        return cls(
            mode=plans[0].mode,
            requests=[request for plan in plans for request in plan.requests],
            rows=joined("rows"),
            starts=joined("starts"),
            counts=joined("counts"),
            tokens=joined("tokens"),
            samples=joined("samples"),
            mapped=joined("mapped"),
            replays=plans[0].replays,
            max_seq_len=max(plan.max_seq_len for plan in plans),
            restored=pairs("restored"),
            kept=pairs("kept"),
            parts=parts,
        )

    def follows(self, before: JointPlan) -> bool:
        """As `StepPlan.follows`, in every share that has a step."""
        counts, counts_before = ([part and len(part.requests) for part in plan.parts] for plan in (self, before))
        return counts == counts_before and super().follows(before)


class Schedulers:
    """The schedulers of all shares, behind the face of one.

    A request goes to the share with the fewest, and stays there. A step has one mode, and replays or selects; where
    shares want different kinds of steps, those take turns, and a plan of another kind waits.
    """

    def __init__(self, shares: Sequence[Scheduler]):
        self.shares = shares
        self._plans: list[StepPlan | None] = [None] * len(shares)
        self._kinds: list[tuple] = []  # of steps, in the order of their latest turns

    @property
    def pool(self):
        """The first share's; all have the same sizes."""
        return self.shares[0].pool

    @property
    def counters(self) -> Counters:
        """Sums over the shares."""
        return Counters(*map(sum, zip(*(dataclasses.astuple(share.counters) for share in self.shares))))

    @property
    def running(self) -> list[Request]:
        return [request for share in self.shares for request in share.running]

    @property
    def selecting(self) -> int:
        return self.shares[0].selecting

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do; a plan that waits runs even if its requests have ended meanwhile."""
        return all(share.idle for share in self.shares) and not any(self._plans)

    def check(self, request: Request, name: str = "the request") -> None:
        self.shares[0].check(request, name)

    def submit(self, request: Request) -> None:
        self.check(request)
        if request.row is not None:
            raise ValueError("a request that is in tables already cannot be given to the shares of a mesh")
        min(self.shares, key=lambda share: len(share.waiting) + len(share.running)).submit(request)

    def abort(self) -> None:
        for share in self.shares:
            share.abort()
        self._plans = [None] * len(self.shares)

    def reset(self, error: str) -> None:
        for share in self.shares:
            share.reset(error)
        self._plans = [None] * len(self.shares)

    def plan(self, drafts: int = 0) -> JointPlan | None:
        # A step has one number of drafts, which may have been changed since a plan that waits was made.
        drafts = next((plan.drafts for plan in self._plans if plan and plan.drafts), drafts)
        plans = [plan or share.plan(drafts) for share, plan in zip(self.shares, self._plans)]
        kinds = [plan and (plan.mode, plan.replays) for plan in plans]
        wanted = sorted({kind for kind in kinds if kind}, key=lambda kind: (kind[0].value, kind[1]))
        if not wanted:
            return None
        served = min(wanted, key=lambda kind: self._kinds.index(kind) if kind in self._kinds else -1)
        self._kinds = [kind for kind in self._kinds if kind != served] + [served]
        now = [plan if kind == served else None for plan, kind in zip(plans, kinds)]
        self._plans = [None if taken else plan for plan, taken in zip(plans, now)]
        return JointPlan.of(now)

    complete = Scheduler.complete

    def take(
        self,
        plan: JointPlan,
        tokens: OfEach[int],
        margins: OfEach[float],
        logprobs: OfEach[Logprob] | None = None,
        selected: np.ndarray | None = None,
    ) -> list[Request]:
        """What a callback of one share raised keeps the others from no token. selected: the rows of all shares."""
        finished, start, n = [], 0, len(self.shares)
        of_shares = [None] * n if selected is None else np.split(selected, n, axis=1)
        for share, part, rows in zip(self.shares, plan.parts, of_shares):
            if part is None:
                continue
            own = slice(start, start + len(part.requests))
            finished += share.take(part, tokens[own], margins[own], logprobs and logprobs[own], rows)
            start = own.stop
        return finished

    def raised(self) -> BaseException | None:
        """As `Scheduler.raised`."""
        return next((raised for raised in [share.raised() for share in self.shares] if raised is not None), None)


class MeshEngine(Engine):
    """An engine over a mesh of devices.

    Args:
      model, params: from `cut_model` with this mesh.
      options: those of each share: `max_batch`, `chunk_size`, `num_pages` and `reuse_points` count a share's own.
      mesh: every process of it runs the same engine with the same requests in the same order.

    Raises:
      ValueError: `options.trace`, which is for comparisons on one device; `options.context_parallel` that is neither 1
        nor the devices of a share.
    """

    mesh: Mesh

    def __init__(self, model: Model, params: Params, options: EngineOptions, mesh: Mesh):
        if options.trace:
            raise ValueError("MeshEngine: a traced step is one of a single device; leave out options.trace")
        if (devices := options.context_parallel) not in (1, mesh.shape[HEADS]):
            raise ValueError(
                f"MeshEngine: context_parallel must be 1 or the {mesh.shape[HEADS]} devices of a share, got {devices}"
            )
        self.mesh = mesh
        super().__init__(model, params, options)

    def with_options(self, **changes: Any) -> MeshEngine:
        return MeshEngine(self.model, self.params, dataclasses.replace(self.options, **changes), self.mesh)

    def _new_scheduler(self) -> Schedulers:
        return Schedulers([super(MeshEngine, self)._new_scheduler() for _ in range(self.mesh.shape[REQUESTS])])

    def _place(self, params: Params) -> tuple[State, Params]:
        new_state = functools.partial(self._new_state, params)  # which reads their dtype only
        state = jax.eval_shape(new_state)
        check_memory("weights and caches of a device need", bytes_of_a_device(params) + size_of(state))
        self._specs = _specs_of(state, self.options)
        new_state = jax.shard_map(new_state, mesh=self.mesh, in_specs=(), out_specs=self._specs)
        return jax.jit(new_state)(), params

    def _pack(self, program: Program, plan: JointPlan | None) -> jax.Array:
        """Cut as a step returns the array of the step that follows it; every process has the whole."""
        parts = [None] * self.mesh.shape[REQUESTS] if plan is None else plan.parts
        packed = np.concatenate([super(MeshEngine, self)._pack(program, part) for part in parts])
        return jax.make_array_from_callback(packed.shape, NamedSharding(self.mesh, P(REQUESTS)), packed.__getitem__)

    def _replayed(self, program: Program, plan: JointPlan | None) -> Any:
        shares, of_share = self.mesh.shape[REQUESTS], super()._replayed(program, None)
        layers, rows, k = of_share.shape
        shape, sharding = (layers, shares * rows, k), NamedSharding(self.mesh, _OF_ROWS)
        if plan is None:
            return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        none = np.full(of_share.shape, -1, np.int32)
        whole = np.concatenate([part.replayed(rows) if part else none for part in plan.parts], axis=1)
        return jax.make_array_from_callback(shape, sharding, whole.__getitem__)

    def _unpack(self, program: Program, plan: JointPlan, packed: np.ndarray) -> Result:
        shares = np.split(packed, len(plan.parts))
        results = [(steps.unpack_result(program, share), part) for share, part in zip(shares, plan.parts) if part]

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(result, name)[: len(part.requests)] for result, part in results])

        return Result(
            tokens=joined("tokens"),
            margins=joined("margins"),
            accepted=joined("accepted"),
            overflow=any(result.overflow for result, _ in results),
            logprobs=joined("logprobs") if program.choice is Choice.ALL else None,
        )

    def _bucket(self, plan: JointPlan) -> tuple:
        mode, *sizes, expanded = zip(*(super(MeshEngine, self)._bucket(part) for part in plan.parts if part))
        return mode[0], *map(max, sizes), all(expanded)

    def _jitted(self, program: Program) -> Any:
        replayed = [_OF_ROWS] if program.replays else []

        def of_device(params: Params, state: State, *given: jax.Array):
            *others, selected = steps.run_step(program, params, state, *given)
            if selected is not None:  # every device has chosen the same ones, which shard_map does not know
                selected = jax.lax.pmax(selected, HEADS)
            return *others, selected

        step = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(parameter_specs(self.params, self.mesh), self._specs, P(REQUESTS), *replayed),
            out_specs=(self._specs, *4 * [P(REQUESTS)], _OF_ROWS),
        )

        def on_all(params: Params, state: State, *given: jax.Array):
            state, result, *others, selected = step(params, state, *given)
            if jax.process_count() > 1:  # each schedules all requests, so it has to know all tokens
                known = NamedSharding(self.mesh, P())
                result, selected = jax.lax.with_sharding_constraint((result, selected), known)
            return state, result, *others, selected

        return jax.jit(on_all, donate_argnums=1)

    def map_pages(self, *of_shares: np.ndarray) -> None:
        changes = jax.device_put(np.concatenate(of_shares), NamedSharding(self.mesh, P(REQUESTS)))
        tables = _map_on_all(self.state.tables, changes, mesh=self.mesh, size=self.spec.page_size)
        self.state = dataclasses.replace(self.state, tables=tables)

    def copy_states(self, pairs: list[tuple[tuple[int, int], ...]]) -> None:
        caches, sharding = self.state.caches, NamedSharding(self.mesh, P(REQUESTS))
        for of_shares in pairs:
            of_shares = jax.device_put(np.array(of_shares, np.int32), sharding)
            caches = _copy_on_all(caches, of_shares, mesh=self.mesh, spec=self._specs.caches)
        self.state = dataclasses.replace(self.state, caches=caches)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("mesh", "size"))
def _map_on_all(tables: RequestTables, changes: jax.Array, *, mesh: Mesh, size: int) -> RequestTables:
    """changes int32 `[shares * PAGES_AHEAD, 4]`."""
    one = functools.partial(steps.map_pages, size=size)
    return jax.shard_map(one, mesh=mesh, in_specs=P(REQUESTS), out_specs=P(REQUESTS))(tables, changes)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("mesh", "spec"))
def _copy_on_all(caches: Caches, pairs: jax.Array, *, mesh: Mesh, spec: P) -> Caches:
    """pairs int32 `[shares, 2]`."""
    return jax.shard_map(steps.copy_states, mesh=mesh, in_specs=(spec, P(REQUESTS)), out_specs=spec)(caches, pairs)


def _specs_of(state: State, options: EngineOptions) -> State:
    """How a state lies on a mesh: of caches each device has its own where the devices of a share share the pages,
    windows and carried states among them, which are the same on all of a share."""
    shares = P(REQUESTS)
    caches = P((REQUESTS, HEADS)) if options.context_parallel > 1 else shares
    draft = Draft(cache=caches, states=shares, tokens=shares) if isinstance(state.draft, Draft) else shares
    return State(caches=caches, tables=shares, last_tokens=shares, counts=shares, draft=draft)
