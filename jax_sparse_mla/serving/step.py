"""One step of the engine on the device, as one program: request tables, model, choice of tokens.

All that changes is in `State`, which a step takes donated and returns. The host sends one array of int32 and gets one
back, since each array of a call costs it some microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.dspark import BlockDraft, forget
from jax_sparse_mla.serving.model import Caches, Draft, ForwardOutput, Model, Params
from jax_sparse_mla.serving.options import EngineOptions
from jax_sparse_mla.serving.pages import RequestPool
from jax_sparse_mla.serving.plan import StepPlan
from jax_sparse_mla.serving.request import MOST_LOGPROBS, Logprob
from jax_sparse_mla.serving.sampling import Adjusting, Choice, LogitsHook, SamplingArrays, greedy, log_probs, sample

PAGES_AHEAD = 64  # that one call maps before a step


@pytree_dataclass
class State:
    """State that a step updates."""

    caches: Caches
    tables: RequestTables
    last_tokens: jax.Array  # `[rows]`, the latest token of each row of the tables
    # int32 `[rows, vocab]`, where the engine has a hook on logits: how often a token stands in a row's output, of rows
    # whose requests have parameters for it.
    counts: jax.Array | None = None
    draft: Draft | BlockDraft | None = None  # the draft layer's or drafter's, where one drafts


@dataclasses.dataclass(frozen=True)
class Program:
    """The static arguments of a step; each different one is a compilation."""

    model: Model
    mode: ForwardMode  # EXTEND, DECODE or TARGET_VERIFY
    num_requests: int  # of the padded batch
    num_rows: int  # of the padded batch: `num_requests · (drafts + 1)` but in EXTEND
    max_seq_len: int  # width of the page tables, in tokens
    num_changes: int  # pages that the step can map
    drafts: int = 0  # draft tokens of each request, made in the same program by the draft layer or the first layer
    draft_layer: bool = False  # whether a draft layer or a drafter follows the model in this step
    choice: Choice = Choice.GREEDY  # how tokens are chosen
    hook: LogitsHook | None = None  # with Choice.ALL
    # As in `StepInputs`.
    gathered: bool | None = None
    expanded: bool = False
    backend: str | None = None
    batch_invariant: bool = False
    context_parallel: int = 1  # as in `EngineOptions`
    trace: bool = False
    logits: bool = False  # whether to return the logits that tokens were chosen from
    replays: bool = False  # whether layers take positions that the host gives, instead of selecting
    return_selected: bool = False

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The parts of the host's array, in order, and their shapes; all int32.

        requests: rows of the tables (padding: any past the last), first positions, number of positions (padding: 0; of
        a step of drafts that replays, of those whose positions the host gives: it keeps no token behind them),
        for draws also the seeds and the bits of temperature and top_p, and with a hook the lengths of the prompts and
        the bits of its parameters. changes: `RequestPool.take_changes`, padded
        with rows past the last. tokens: −1 is the row's latest token. rows: (position, row of the tables) of
        each query row of a chunk. behind: for a draft layer, the token behind each request's chunk; −1 is the one that
        the step chooses. proposals: drafts that replace the model's own, or −1.
        """
        of_request = 3 if self.choice is Choice.GREEDY else 6 if self.hook is None else 7 + self.hook.size
        fields = {
            "requests": (of_request, self.num_requests),
            "changes": (self.num_changes, 4),
            "tokens": (self.num_rows if self.mode is ForwardMode.EXTEND else self.num_requests,),
        }
        if self.mode is ForwardMode.EXTEND:
            fields["rows"] = (2, self.num_rows)
            if self.draft_layer:
                fields["behind"] = (self.num_requests,)
        if self.drafts:
            fields["proposals"] = (self.num_requests, self.drafts)
        return fields


def pack(
    program: Program, plan: StepPlan | None, num_table_rows: int, proposals: np.ndarray | None = None
) -> np.ndarray:
    """The host's array for a step; without a plan all is padding."""
    packed = np.zeros(sum(map(math.prod, program.fields.values())), np.int32)
    parts = unpack(program, packed)
    requests = parts["requests"]
    requests[0] = parts["changes"][:, 0] = num_table_rows
    if program.mode is ForwardMode.EXTEND:
        parts["rows"][1] = num_table_rows
    if program.drafts:
        parts["proposals"][:] = -1
    if plan is None:
        return packed
    n = len(plan.requests)
    requests[0, :n], requests[1, :n], requests[2, :n] = plan.rows, plan.starts, plan.known_counts
    if program.choice is not Choice.GREEDY:
        sampling = [request.sampling for request in plan.requests]
        requests[3, :n] = np.array([s.seed & 0xFFFFFFFF for s in sampling], np.uint32).view(np.int32)
        requests[4, :n] = np.array([s.temperature for s in sampling], np.float32).view(np.int32)
        requests[5, :n] = np.array([s.top_p for s in sampling], np.float32).view(np.int32)
    if program.hook is not None:
        requests[6, :n] = [len(request.prompt) for request in plan.requests]
        for i, request in enumerate(plan.requests):
            requests[7 : 7 + len(request.adjust), i] = np.array(request.adjust, np.float32).view(np.int32)
    parts["changes"][: len(plan.mapped)] = plan.mapped
    tokens = plan.tokens
    if plan.mode is ForwardMode.EXTEND:
        parts["tokens"][: len(tokens)] = tokens
        parts["rows"][0, : len(tokens)] = plan.positions()
        parts["rows"][1, : len(tokens)] = np.repeat(plan.rows, plan.counts)
        if program.draft_layer:
            ends = (plan.starts + plan.counts).tolist()
            behind = [-1 if s else r.tokens_at(end, 1)[0] for r, end, s in zip(plan.requests, ends, plan.samples)]
            parts["behind"][:n] = behind
    else:
        parts["tokens"][:n] = tokens[:: program.drafts + 1]
    if proposals is not None:
        parts["proposals"][:n] = proposals
    return packed


def following(program: Program, packed: jax.Array, num_table_rows: int) -> jax.Array | None:
    """The array of the next step if that `StepPlan.follows` this one; None where no step can."""
    if program.mode is not ForwardMode.DECODE:
        return None
    requests, changes, _ = unpack(program, packed).values()
    live = requests[2]
    unmapped = jnp.zeros_like(changes).at[:, 0].set(num_table_rows).reshape(-1)
    return jnp.concatenate(
        [requests[0], requests[1] + live, requests[2:].reshape(-1), unmapped, jnp.where(live > 0, -1, 0)]
    )


def unpack(program: Program, packed: Any) -> dict[str, Any]:
    """The parts of the host's array, by name."""
    parts, at = {}, 0
    for name, shape in program.fields.items():
        size = math.prod(shape)
        parts[name] = packed[at : at + size].reshape(shape)
        at += size
    return parts


@dataclasses.dataclass
class Result:
    """Results of a step for the host."""

    tokens: np.ndarray  # int32 `[requests, drafts + 1]`
    margins: np.ndarray  # float32 `[requests, drafts + 1]`; NaN where logits are not finite
    accepted: np.ndarray  # int32 `[requests]`, the number of drafts that the model chose too
    overflow: bool  # whether a bucket was too small
    # With Choice.ALL, of each token: int32 `[requests, drafts + 1, 1 + 2k]`, the bits of its log-probability, the k
    # most likely tokens, and the bits of their log-probabilities.
    logprobs: np.ndarray | None = None

    def logprobs_of(self, request: int, place: int) -> Logprob:
        """Those of a request's token."""
        row = self.logprobs[request, place]
        top, values = np.split(row[1:], 2)
        return Logprob(float(row[:1].view(np.float32)[0]), tuple(zip(top.tolist(), values.view(np.float32).tolist())))


def unpack_result(program: Program, packed: np.ndarray) -> Result:
    size, each = program.num_requests * (program.drafts + 1), program.drafts + 1
    end = 2 * size + program.num_requests
    logprobs = packed[end + 1 :].reshape(program.num_requests, each, -1) if program.choice is Choice.ALL else None
    return Result(
        tokens=packed[:size].reshape(-1, each),
        margins=packed[size : 2 * size].view(np.float32).reshape(-1, each),
        accepted=packed[2 * size : end],
        overflow=bool(packed[end]),
        logprobs=logprobs,
    )


def run_step(program: Program, params: Params, state: State, packed: jax.Array, replayed: jax.Array | None = None):
    """The step; jit it with the state donated.

    Args:
      replayed: int32 `[layers that select, num_rows, k]`, where the program replays.

    Returns:
      The state, the packed `Result`, the array that `following` makes, the trace, the logits, and the positions that
      were attended to; the last three are empty and None unless the program asks for them.
    """
    with jax.numpy_rank_promotion("allow"):  # whatever the caller asks of programs of its own
        return _run_step(program, params, state, packed, replayed)


def _run_step(program: Program, params: Params, state: State, packed: jax.Array, replayed: jax.Array | None):
    parts = unpack(program, packed)
    num_table_rows = state.tables.req_to_token.shape[0]
    state = dataclasses.replace(state, tables=map_pages(state.tables, parts["changes"], program.model.spec.page_size))
    if isinstance(state.draft, BlockDraft):
        row, index, *_ = parts["changes"].T  # a request that begins maps its first page
        state = dataclasses.replace(state, draft=forget(state.draft, jnp.where(index == 0, row, num_table_rows)))
    rows, starts, counts = parts["requests"][:3]
    tokens = parts["tokens"]
    if program.mode is ForwardMode.EXTEND:
        positions, row_of = parts["rows"]
    else:
        positions, row_of = starts, rows
    tokens = jnp.where(tokens < 0, state.last_tokens.at[row_of].get(mode="fill", fill_value=0), tokens)
    if program.hook is not None:
        state = _count(state, tokens, positions, row_of, parts["requests"])
    if program.drafts:
        return _draft_and_verify(program, params, state, tokens, parts, replayed)
    batch = _batch(program, program.mode, rows, starts + counts, _slots(state.tables, row_of, positions), counts)
    inputs = _inputs(program, state, batch, tokens, positions)
    inputs = _with_selected(program, inputs, replayed)
    out = program.model.forward(params, state.caches, inputs)
    last_rows = jnp.clip(jnp.cumsum(counts) - 1, 0, program.num_rows - 1)
    hidden = out.hidden[last_rows] if program.mode is ForwardMode.EXTEND else out.hidden
    logits = program.model.logits(params, hidden)
    outputs = state.counts.at[rows].get(mode="fill", fill_value=0) if program.hook is not None else None
    chosen, *scores = _choose(program, logits, starts + counts, parts["requests"], outputs)
    state = dataclasses.replace(
        state, caches=out.caches, last_tokens=state.last_tokens.at[rows].set(chosen, mode="drop")
    )
    if program.draft_layer and isinstance(state.draft, BlockDraft):
        state = _keep(program, params, state, out.states, row_of, positions, rows, starts, starts + counts)
    elif program.draft_layer:
        behind = jnp.where(parts["behind"] < 0, chosen, parts["behind"])
        ends = jnp.where(counts > 0, last_rows, program.num_rows)
        shifted = jnp.roll(tokens, -1).at[ends].set(behind, mode="drop")
        inputs = _inputs(program, state, batch, shifted, positions)
        state = _follow(program, params, state, inputs, out.states, rows, last_rows)
    result = _pack_result(chosen, *scores, jnp.zeros_like(rows), out.overflow)
    after = following(program, packed, num_table_rows)
    return state, result, after, out.trace, logits if program.logits else None, out.selected


def _draft_and_verify(
    program: Program, params: Params, state: State, tokens: jax.Array, parts: dict[str, jax.Array], replayed
):
    """K drafts, then the whole model over the last token and the drafts: as `run_step`.

    Rejected tokens need no clean-up: rows behind a request's length are never read, and the next round writes them
    again. Where it replays, drafts are made as ever, by layers that select, and the model's rows attend to what is
    given: the drafts of the run that gave it are made again.
    """
    rows, starts, counts = parts["requests"][:3]
    steps, live = program.drafts, counts > 0
    make = _draft_with_layer if program.draft_layer else _draft_with_first_layer
    make = _draft_with_block if isinstance(state.draft, BlockDraft) else make
    state, drafts = make(program, params, state, tokens, parts)
    positions = (starts[:, None] + jnp.arange(steps + 1)).reshape(-1)
    slots = _slots(state.tables, jnp.repeat(rows, steps + 1), positions)
    # The mode adds the drafts to the lengths; a request of length 0 would be padding, but its prompt has been read.
    batch = _batch(program, ForwardMode.TARGET_VERIFY, rows, jnp.where(live, starts, 0), slots, None)
    inputs = _inputs(program, state, batch, drafts.reshape(-1), positions)
    inputs = _with_selected(program, inputs, replayed)
    out = program.model.forward(params, state.caches, inputs)
    logits = program.model.logits(params, out.hidden)
    requests, outputs = jnp.repeat(parts["requests"], steps + 1, axis=1), None
    if program.hook is not None:
        drafted = jnp.cumsum(jax.nn.one_hot(drafts, logits.shape[-1], dtype=jnp.int32).at[:, 0].set(0), 1)
        counted = state.counts.at[rows].get(mode="fill", fill_value=0)
        outputs = (counted[:, None] + drafted).reshape(logits.shape)
    chosen, *scores = _choose(program, logits, positions + 1, requests, outputs)
    chosen = chosen.reshape(-1, steps + 1)
    accepted = jnp.cumprod((drafts[:, 1:] == chosen[:, :-1]).astype(jnp.int32), 1).sum(1)
    if program.replays:  # a row whose positions are not given has attended to nothing
        accepted = jnp.minimum(accepted, jnp.maximum(counts - 1, 0))
    last = jnp.take_along_axis(chosen, accepted[:, None], 1)[:, 0]
    state = dataclasses.replace(state, caches=out.caches, last_tokens=state.last_tokens.at[rows].set(last, mode="drop"))
    if program.hook is not None:
        taken = (jnp.arange(steps + 1) > 0) & (jnp.arange(steps + 1) <= accepted[:, None])
        state = dataclasses.replace(state, counts=state.counts.at[rows[:, None], drafts].add(taken, mode="drop"))
    if isinstance(state.draft, BlockDraft):
        ends = jnp.where(live, starts + accepted + 1, starts)
        state = _keep(program, params, state, out.states, jnp.repeat(rows, steps + 1), positions, rows, starts, ends)
    elif program.draft_layer:
        last_rows = jnp.arange(len(rows)) * (steps + 1) + accepted
        inputs = _inputs(program, state, batch, chosen.reshape(-1), positions)
        state = _follow(program, params, state, inputs, out.states, rows, last_rows)
    result = _pack_result(chosen.reshape(-1), *scores, accepted, out.overflow)
    return state, result, None, out.trace, logits if program.logits else None, out.selected


def _draft_with_first_layer(program: Program, params: Params, state: State, tokens: jax.Array, parts):
    """K draft steps of the model's first layer: the state, and `[requests, K + 1]`, the last token and the drafts.

    The first layer's keys depend on the tokens only, so drafts write the same rows that the verify step writes.
    """
    drafted = [tokens]
    for i in range(program.drafts):
        inputs = dataclasses.replace(_one_row_each(program, state, drafted[-1], parts, i), trace=False)
        out = program.model.forward(params, state.caches, inputs, layers=1)
        state = dataclasses.replace(state, caches=out.caches)
        drafted.append(_proposed(program, params, out.hidden, parts["proposals"][:, i]))
    return state, jnp.stack(drafted, 1)


def _draft_with_layer(program: Program, params: Params, state: State, tokens: jax.Array, parts):
    """As `_draft_with_first_layer`: the first draft is there, and the draft layer makes the others of its own states.

    It writes the rows of positions where the model has not been; `_follow` writes them again.
    """
    rows, proposals = parts["requests"][0], parts["proposals"]
    first_draft = state.draft.tokens.at[rows].get(mode="fill", fill_value=0)
    states = state.draft.states.at[rows].get(mode="fill", fill_value=0)
    drafted = [tokens, jnp.where(proposals[:, 0] >= 0, proposals[:, 0], first_draft)]
    for i in range(1, program.drafts):
        state, out = _draft(program, params, state, _one_row_each(program, state, drafted[-1], parts, i - 1), states)
        states = out.states
        drafted.append(_proposed(program, params, out.hidden, proposals[:, i]))
    return state, jnp.stack(drafted, 1)


def _draft_with_block(program: Program, params: Params, state: State, tokens: jax.Array, parts):
    """As `_draft_with_first_layer`, by a drafter, all at once."""
    rows, starts = parts["requests"][:2]
    drafts = program.model.propose(params, state.draft, rows, tokens, starts, parts["proposals"])
    return state, jnp.concatenate([tokens[:, None], drafts], 1)


def _keep(program: Program, params: Params, state: State, *step: jax.Array) -> State:
    return dataclasses.replace(state, draft=program.model.keep(params, state.draft, *step))


def _one_row_each(program: Program, state: State, tokens: jax.Array, parts, ahead: int) -> StepInputs:
    """A DECODE step of each request's position `ahead` of its first one."""
    rows, starts, counts = parts["requests"][:3]
    positions = starts + ahead
    slots = _slots(state.tables, rows, positions)
    batch = _batch(program, ForwardMode.DECODE, rows, jnp.where(counts > 0, positions + 1, 0), slots, None)
    return _inputs(program, state, batch, tokens, positions)


def _proposed(program: Program, params: Params, hidden: jax.Array, proposals: jax.Array) -> jax.Array:
    return jnp.where(proposals >= 0, proposals, greedy(program.model.logits(params, hidden))[0])


def _follow(program: Program, params: Params, state: State, inputs: StepInputs, states, rows, last_rows) -> State:
    """The draft layer over the rows of a step: its tokens are those behind the rows, `last_rows` each request's last
    row that counts, from which the first draft of the next round is made."""
    state, out = _draft(program, params, state, inputs, states)
    tokens = greedy(program.model.logits(params, out.hidden[last_rows]))[0]
    draft = dataclasses.replace(
        state.draft,
        states=state.draft.states.at[rows].set(out.states[last_rows], mode="drop"),
        tokens=state.draft.tokens.at[rows].set(tokens, mode="drop"),
    )
    return dataclasses.replace(state, draft=draft)


def _draft(program: Program, params: Params, state: State, inputs: StepInputs, states) -> tuple[State, ForwardOutput]:
    out = program.model.draft(params, state.draft.cache, inputs, states)
    return dataclasses.replace(state, draft=dataclasses.replace(state.draft, cache=out.caches)), out


def _inputs(program: Program, state: State, batch: ForwardBatch, tokens, positions) -> StepInputs:
    live = _live_rows(batch)
    return StepInputs(
        batch=batch,
        tables=state.tables,
        tokens=jnp.where(live, tokens, 0),
        positions=jnp.where(live, positions, 0),
        gathered=program.gathered if batch.mode is ForwardMode.EXTEND else None,
        expanded=program.expanded and batch.mode is ForwardMode.EXTEND,
        backend=program.backend,
        batch_invariant=program.batch_invariant,
        pages_axis=program.model.config.axis_name if program.context_parallel > 1 else None,
        trace=program.trace,
    )


def _with_selected(program: Program, inputs: StepInputs, replayed: jax.Array | None) -> StepInputs:
    if not (program.replays or program.return_selected):  # models of other projects may not take them
        return inputs
    return dataclasses.replace(inputs, selected=replayed, return_selected=program.return_selected)


def _live_rows(batch: ForwardBatch) -> jax.Array:
    num_rows = len(batch.out_cache_loc)
    if batch.mode is ForwardMode.EXTEND:
        return jnp.arange(num_rows) < jnp.sum(batch.extend_lens)
    return jnp.repeat(batch.seq_lens > 0, num_rows // batch.seq_lens.shape[0])


def _batch(program: Program, mode: ForwardMode, rows, seq_lens, slots, counts) -> ForwardBatch:
    return ForwardBatch(
        mode=mode,
        max_seq_len=program.max_seq_len,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        extend_lens=counts if mode is ForwardMode.EXTEND else None,
        num_draft_tokens=program.drafts + 1 if mode is ForwardMode.TARGET_VERIFY else None,
    )


def _slots(tables: RequestTables, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """The slot of each position; 0 where there is none."""
    return jnp.maximum(tables.req_to_token.at[rows, positions].get(mode="fill", fill_value=0), 0)


def _count(state: State, tokens, positions, row_of, requests) -> State:
    """Counts the tokens of a step that stand in an output, behind the prompt; a row begins anew with its prompt."""
    rows, starts, prompts, num_rows = requests[0], requests[1], requests[6], len(state.last_tokens)
    counts = state.counts.at[jnp.where(starts < prompts, rows, num_rows)].set(0, mode="drop")
    prompt_of = jnp.zeros(num_rows, jnp.int32).at[rows].set(prompts, mode="drop")
    behind = positions >= prompt_of.at[row_of].get(mode="fill", fill_value=0)
    return dataclasses.replace(state, counts=counts.at[row_of, tokens].add(behind.astype(jnp.int32), mode="drop"))


def _choose(program: Program, logits, positions, requests, outputs=None):
    """Tokens, margins, and log-probabilities or None; the margin of logits that are not finite is NaN.

    outputs: with a hook, int32 `[B, vocab]`, how often a token stands in what each row continues.
    """
    own, logprobs = logits, None
    if program.choice is Choice.GREEDY:
        tokens, margins, finite = greedy(logits)
    else:
        temperature, top_p = (lax.bitcast_convert_type(bits, jnp.float32) for bits in requests[4:6])
        params = SamplingArrays(temperature=temperature, top_p=top_p, seed=requests[3])
        if program.hook is not None:
            given = lax.bitcast_convert_type(requests[7:], jnp.float32).T
            logits = program.hook(logits, Adjusting(parameters=given, counts=outputs, temperature=temperature))
        tokens, margins, finite = sample(logits, positions, params, cut=program.choice >= Choice.TOP_P)
        if program.hook is not None:  # which may forbid tokens by −inf
            finite = jnp.isfinite(own).all(-1) & ~jnp.isnan(logits).any(-1)
    if program.choice is Choice.ALL:
        value, top, values = log_probs(own, tokens, MOST_LOGPROBS)
        bits = [lax.bitcast_convert_type(x, jnp.int32) for x in (value[:, None], values)]
        logprobs = jnp.concatenate([bits[0], top, bits[1]], 1)
    return tokens, jnp.where(finite, margins, jnp.nan), logprobs


def _pack_result(chosen, margins, logprobs, accepted, overflow) -> jax.Array:
    overflow = jnp.zeros((), jnp.int32) if overflow is None else overflow.astype(jnp.int32)
    parts = [chosen, lax.bitcast_convert_type(margins, jnp.int32), accepted, overflow[None]]
    return jnp.concatenate(parts if logprobs is None else [*parts, logprobs.reshape(-1)])


def map_pages(tables: RequestTables, changes: jax.Array, size: int) -> RequestTables:
    """The tables with pages of `size` tokens mapped, int32 `[n, 4]` as `RequestPool.take_changes` gives them."""
    row, index, page, swa_page = changes.T[:, :, None]
    offsets = jnp.arange(size, dtype=jnp.int32)
    slots = page * size + offsets
    req_to_token = tables.req_to_token.at[row, index * size + offsets].set(slots, mode="drop")
    if tables.full_to_swa is None:
        return RequestTables(req_to_token=req_to_token)
    # Changes that are padding name page 0: its slots map to those of page 0, which padding rows write to.
    swa_slots = jnp.where((swa_page > 0) | (page == 0), swa_page * size + offsets, -1)
    return RequestTables(req_to_token=req_to_token, full_to_swa=tables.full_to_swa.at[slots].set(swa_slots))


def no_changes(count: int, num_table_rows: int) -> np.ndarray:
    """int32 `[count, 4]` for `map_pages`, all padding."""
    return np.tile(np.array([num_table_rows, 0, 0, 0], np.int32), (count, 1))


def changes_ahead(plan: StepPlan, room: int, num_table_rows: int) -> np.ndarray:
    """Takes from a plan the pages that its step's array has no room for, those of a long prefix that is reused.

    The first page of each request stays: by it the step knows that a request begins. Returns int32
    `[n, PAGES_AHEAD, 4]` for `map_pages`, padded with rows past the last.
    """
    mapped = plan.mapped[np.argsort(plan.mapped[:, 1] > 0, kind="stable")]
    rest, plan.mapped = mapped[room:], mapped[:room]
    padded = no_changes(-(-len(rest) // PAGES_AHEAD) * PAGES_AHEAD, num_table_rows)
    padded[: len(rest)] = rest
    return padded.reshape(-1, PAGES_AHEAD, 4)


def empty_caches(model: Model, options: EngineOptions, pool: RequestPool) -> Caches:
    """A model's caches for a device's pages of a pool and the requests of an engine."""
    return model.new_caches(
        num_pages=pool.num_pages // pool.devices,
        num_swa_pages=pool.num_swa_pages,
        max_requests=options.max_batch + (options.reuse_points if model.spec.windowed else 0),
        max_draft_tokens=options.speculative_steps + 1 if options.speculative_steps else 0,
        bf16=options.bf16_cache,
    )


def empty_state(model: Model, params: Params, options: EngineOptions, pool: RequestPool) -> State:
    """The state of an engine before its first step: empty caches, and tables of the sizes of the host's."""
    draft = None
    if options.speculative_steps:
        draft = model.new_draft(
            params,
            max_requests=options.max_batch,
            num_pages=pool.num_pages // pool.devices,
            num_swa_pages=pool.num_swa_pages,
            bf16=options.bf16_cache,
        )
    req_to_token, full_to_swa = jnp.full(pool.req_to_token.shape, -1, jnp.int32), None
    if pool.window is not None:
        full_to_swa = jnp.full(pool.full_to_swa.shape, -1, jnp.int32)
        full_to_swa = full_to_swa.at[: pool.page_size].set(jnp.arange(pool.page_size, dtype=jnp.int32))
    tables = RequestTables(req_to_token=req_to_token, full_to_swa=full_to_swa)
    rows = len(pool.req_to_token)
    counts = None if options.logits_hook is None else jnp.zeros((rows, model.vocab_size), jnp.int32)
    caches, last_tokens = empty_caches(model, options, pool), jnp.zeros(rows, jnp.int32)
    return State(caches=caches, tables=tables, last_tokens=last_tokens, counts=counts, draft=draft)


def copy_states(caches: Caches, pairs: jax.Array) -> Caches:
    """Copies carried states in all layers; pairs int32 `[n, 2]` of rows (from, to). Jit it with the caches donated."""

    def copy(part):
        if not isinstance(part, CompressorState):
            return part

        def rows(x):
            by_layer = x.reshape(part.num_layers, part.max_requests, *x.shape[1:])
            return by_layer.at[:, pairs[:, 1]].set(by_layer[:, pairs[:, 0]]).reshape(x.shape)

        return dataclasses.replace(part, kv=rows(part.kv), score=rows(part.score))

    return jax.tree.map(copy, caches, is_leaf=lambda part: isinstance(part, CompressorState))
