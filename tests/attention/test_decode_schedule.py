"""Which blocks of keys each thread block of the SM90 decode kernel attends to: the kernel's own code, compiled for the
host, where the threads of a block take turns."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from attention_calls import plan_of_many
from host_build import compiled_once
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.attention.hopper import decode_plan
from jax_sparse_mla.attention.hopper.decode_plan import ALWAYS, AS_LENGTHS_SAY, NEVER

BLOCK = 64
ROW_COST = decode_plan._ROW_COST
MOST_ROUNDS = 32


@dataclasses.dataclass(frozen=True)
class Run:
    row: int
    first: int
    last: int
    part: int
    blocks: int  # of the whole row

    @property
    def whole(self) -> bool:
        return (self.first, self.last) == (0, self.blocks)


@dataclasses.dataclass(frozen=True)
class Piece:
    blocks: int
    joins: bool
    equally: bool
    parts: tuple[int, int]
    runs: tuple[Run, ...]

    @property
    def units(self) -> int:
        """How long it takes, in blocks' time."""
        return sum(run.last - run.first + ROW_COST for run in self.runs)


class CutRow(NamedTuple):
    row: int
    first: int  # thread block
    parts: int


@pytest.fixture(scope="module")
def schedule_and_cuts(tmp_path_factory):
    """A function that returns the pieces of all groups, and the rows that are listed as cut."""
    call = compiled_once("decode_schedule", "sparse_decode", tmp_path_factory).decode_schedule
    call.restype = ctypes.c_int64

    def run(rows, groups, cuts, topks, lengths=(None, None), rows_per_length=1, tiles=1):
        as_ints = lambda x: None if x is None else np.ascontiguousarray(x, np.int32)  # noqa: E731
        given_lengths, topks = [as_ints(x) for x in lengths], as_ints(topks)
        pointers = [x if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in (topks, *given_lengths)]
        out = np.empty(6 * groups + 5 * (rows + 2 * groups) + 1 + 3 * groups * tiles, np.int32)
        where = ctypes.c_int64(out.size), out.ctypes.data_as(ctypes.c_void_p)
        written = call(rows, groups, tiles, cuts, *pointers, rows_per_length, *where)
        assert written <= out.size, "more runs than rows and cuts, or more cut rows than thread blocks"
        numbers = iter(out[:written].tolist())
        take = lambda n: [next(numbers) for _ in range(n)]  # noqa: E731
        pieces = []
        for _ in range(groups):
            blocks, joins, equally, first, second, count = take(6)
            runs = tuple(Run(*take(5)) for _ in range(count))
            pieces.append(Piece(blocks, bool(joins), bool(equally), (first, second), runs))
        return pieces, [CutRow(*take(3)) for _ in range(*take(1))]

    return run


@pytest.fixture(scope="module")
def schedule(schedule_and_cuts):
    """A function that returns the pieces of all groups."""
    return lambda *args: schedule_and_cuts(*args)[0]


def blocks_of(rows, topks, lengths=(None, None), rows_per_length=1) -> np.ndarray:
    """Blocks of each row by the formula: those of the first table and of the second, at least one."""
    total = np.zeros(rows, np.int64)
    for topk, given_lengths in zip(topks, lengths):
        columns = np.full(rows, topk) if given_lengths is None else np.repeat(given_lengths, rows_per_length)
        total += -(-np.clip(columns, 0, topk) // BLOCK)
    return np.maximum(total, 1)


def check_every_block_is_taken_once(pieces: list[Piece], blocks: np.ndarray) -> None:
    taken = [np.zeros(n, int) for n in blocks]
    for piece in pieces:
        assert piece.blocks == sum(run.last - run.first for run in piece.runs)
        for run in piece.runs:
            assert run.blocks == blocks[run.row] and 0 <= run.first < run.last <= run.blocks
            taken[run.row][run.first : run.last] += 1
    assert all((row == 1).all() for row in taken)


def check_parts(pieces: list[Piece]) -> None:
    """A part has a place of its own among its thread block's two, and the parts of a row lie in groups that follow each
    other, the first in the second place and the others in the first: so they are found again."""
    assert len({piece.joins for piece in pieces}) == 1
    parts: dict[int, list[tuple[int, Run]]] = {}
    for group, piece in enumerate(pieces):
        cut = [run for run in piece.runs if not run.whole]
        assert piece.joins or not cut
        listed = {place: row for place, row in enumerate(piece.parts) if row >= 0}
        assert listed == {run.part: run.row for run in cut} and len(listed) == len(cut)
        for run in cut:
            parts.setdefault(run.row, []).append((group, run))
    for of_row in parts.values():
        groups = [group for group, _ in of_row]
        assert groups == list(range(groups[0], groups[0] + len(of_row))) and len(of_row) >= 2
        assert [run.part for _, run in of_row] == [1] + [0] * (len(of_row) - 1)
        assert all(a.last == b.first for (_, a), (_, b) in itertools.pairwise(of_row))


def check_cut_rows(listed: list[CutRow], pieces: list[Piece], tiles: int) -> None:
    """The rows that are joined are those that are cut, for each tile, with the parts that the pieces have of them."""
    assert len({piece.equally for piece in pieces}) == 1
    assert len(listed) <= len(pieces) * tiles and all(cut.parts > 1 or pieces[0].equally for cut in listed)
    assert len({(cut.row, cut.first % tiles) for cut in listed}) == len(listed)
    groups: dict[int, list[int]] = {}
    for group, piece in enumerate(pieces):
        for run in piece.runs:
            if not run.whole:
                groups.setdefault(run.row, []).append(group)
    wanted = {(row, t): (of_row[0] * tiles + t, len(of_row)) for row, of_row in groups.items() for t in range(tiles)}
    assert {(cut.row, cut.first % tiles): (cut.first, cut.parts) for cut in listed if cut.parts > 1} == wanted


def check(pieces: list[Piece], blocks: np.ndarray) -> None:
    check_every_block_is_taken_once(pieces, blocks)
    check_parts(pieces)


def even_share(blocks: np.ndarray, groups: int) -> int:
    return -(-(int(blocks.sum()) + len(blocks) * ROW_COST) // groups)


def line_cost(rows: int, groups: int, tiles: int) -> int:
    """What the line, cut, costs beyond its pieces' blocks."""
    return decode_plan._JOIN_COST + (min(rows, groups) + groups) * tiles // decode_plan._PARTS_JOINED


TOPKS = [(128, 1024), (2048, 0), (64, 0), (100, 333), (0, 0), (1, 16384)]


@st.composite
def calls(draw):
    topks = draw(st.sampled_from(TOPKS))
    groups = draw(st.sampled_from([1, 2, 3, 7, 16]))
    rows_per_length = draw(st.sampled_from([1, 2, 4]))
    requests = draw(st.sampled_from([1, 2, 5, 9, 40, 61, 150]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["uniform", "few long", "equal", "none", "hostile"]))

    def lengths_of(topk):
        some = rng.integers(0, topk + 1, requests)
        if kind == "few long":
            some = np.where(rng.random(requests) < 0.05, topk, some // 16)
        elif kind == "equal":
            some[:] = some[0]
        elif kind == "none":
            some[:] = 0
        elif kind == "hostile":
            some = rng.choice([-7, 2**31 - 1, -(2**31), topk, topk + 1, 0], requests)
        return some.astype(np.int32)

    which = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    lengths = tuple(lengths_of(topk) if given_lengths else None for topk, given_lengths in zip(topks, which))
    return groups, topks, lengths, requests * rows_per_length, rows_per_length


@pytest.mark.long
@given(call=calls(), cuts=st.sampled_from([NEVER, ALWAYS, AS_LENGTHS_SAY]), tiles=st.sampled_from([1, 2, 3]))
@settings(max_examples=100, deadline=None)
def test_rows_of_any_lengths(schedule_and_cuts, call, cuts, tiles):
    groups, topks, lengths, rows, rows_per_length = call
    pieces, listed = schedule_and_cuts(rows, groups, cuts, topks, lengths, rows_per_length, tiles)
    blocks = blocks_of(rows, topks, lengths, rows_per_length)
    check(pieces, blocks)
    check_cut_rows(listed, pieces, tiles)
    even, most = even_share(blocks, groups), max(piece.units for piece in pieces)
    cut = even + ROW_COST + line_cost(rows, groups, tiles)
    if cuts == ALWAYS:
        assert most <= cut
    if cuts == NEVER:
        assert not pieces[0].joins
        slack = max(-(-topks[0] // BLOCK) + -(-topks[1] // BLOCK) - 1, 0) // 32 * (rows // groups)  # sizes told apart
        assert most <= even + blocks.max() + slack
    if cuts == AS_LENGTHS_SAY:
        assert most + pieces[0].joins * decode_plan._JOIN_COST <= cut
        assert groups > 1 or not pieces[0].joins


@pytest.mark.long
@given(
    rows=st.sampled_from([1, 2, 5, 16, 33, 100, 1000]),
    groups=st.sampled_from([1, 2, 16, 66, 132]),
    topks=st.sampled_from(TOPKS),
    cuts=st.sampled_from([NEVER, ALWAYS]),
    tiles=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=50, deadline=None)
def test_rows_of_one_length(schedule_and_cuts, rows, groups, topks, cuts, tiles):
    pieces, listed = schedule_and_cuts(rows, groups, cuts, topks, tiles=tiles)
    blocks = blocks_of(rows, topks)
    check(pieces, blocks)
    check_cut_rows(listed, pieces, tiles)
    most, (rounds, rest) = max(piece.units for piece in pieces), divmod(rows, groups)
    if cuts == NEVER:
        assert most == -(-rows // groups) * (blocks[0] + ROW_COST) and not pieces[0].joins
    elif 0 < 2 * rest <= groups:
        assert most == rounds * (blocks[0] + ROW_COST) + -(-blocks[0] // (groups // rest)) + ROW_COST
        assert all(len(piece.runs) <= rounds + 1 for piece in pieces)
    else:
        assert most <= even_share(blocks, groups) + ROW_COST


@pytest.mark.parametrize("rows", [3, 16, 70, 148, 296, 300])
def test_equal_lengths_are_as_none(schedule, rows):
    """For each group what it would have without lengths."""
    plan = plan_of_many(rows, 64, (128, 512), has_lengths=False, sm_count=132)
    wanted = schedule(rows, 132, plan.cuts, (128, 512))
    pieces = schedule(rows, 132, AS_LENGTHS_SAY, (128, 512), (None, np.full(rows, 512)))
    check(pieces, blocks_of(rows, (128, 512)))
    assert sorted(piece.units for piece in pieces) == sorted(piece.units for piece in wanted)
    assert pieces[0].joins == wanted[0].joins == (plan.cuts == ALWAYS)


@pytest.mark.always(2)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("requests", [64, 74, 128, 256, 600])
def test_the_rows_of_a_model_with_compressed_keys_are_spread_evenly(schedule, heads, requests):
    """128 columns and up to 1,024 more, two tokens a request, on 132 multiprocessors: nothing is worth its joining."""
    topks, rows = (128, 1024), 2 * requests
    plan = plan_of_many(rows, heads, topks, has_lengths=True, sm_count=132)
    for seed in range(1 + (requests < 256)):
        lengths = (None, np.random.default_rng(seed).integers(0, 1025, requests))
        pieces = schedule(rows, plan.groups, plan.cuts, topks, lengths, 2)
        blocks = blocks_of(rows, topks, lengths, 2)
        check(pieces, blocks)
        even, most = even_share(blocks, plan.groups), max(piece.units for piece in pieces)
        assert not pieces[0].joins
        if rows > 3 * plan.groups:
            assert most <= 1.06 * even


def test_one_long_row_among_short_ones_is_cut(schedule):
    lengths = np.full(300, 64)
    lengths[177] = 16384
    pieces = schedule(300, 132, AS_LENGTHS_SAY, (16384, 0), (lengths, None))
    check(pieces, blocks_of(300, (16384, 0), (lengths, None)))
    assert pieces[0].joins and max(piece.units for piece in pieces) <= 9


@pytest.mark.parametrize(
    ("rows", "columns", "topk"), [(1, 2000, 2048), (3, 2000, 2048), (16, 2000, 2048), (16, 500, 512)]
)
def test_few_rows_are_cut_in_equal_parts(schedule_and_cuts, rows, columns, topk):
    """As without lengths, in a table of as many blocks. With 500 columns nothing else is worth its joining."""
    wanted = schedule_and_cuts(rows, 132, ALWAYS, (columns, 0))
    pieces, listed = schedule_and_cuts(rows, 132, AS_LENGTHS_SAY, (topk, 0), (np.full(rows, columns), None))
    check(pieces, blocks_of(rows, (columns, 0)))
    check_cut_rows(listed, pieces, tiles=1)
    assert (pieces, listed) == wanted and pieces[0].equally and len(listed) == rows


@pytest.mark.parametrize(("rows", "long"), [(40, 33), (60, 59), (100, 97)])
def test_a_long_row_is_cut_where_rows_are_fewer_than_groups(schedule_and_cuts, rows, long):
    lengths = np.full(rows, 64)
    lengths[long] = 16384
    pieces, listed = schedule_and_cuts(rows, 132, AS_LENGTHS_SAY, (16384, 0), (lengths, None))
    blocks = blocks_of(rows, (16384, 0), (lengths, None))
    check(pieces, blocks)
    check_cut_rows(listed, pieces, tiles=1)
    assert [cut.row for cut in listed] == [long]
    assert max(piece.units for piece in pieces) <= even_share(blocks, 132) + ROW_COST


def test_more_rows_than_are_dealt_stay_in_line(schedule):
    lengths = np.random.default_rng(0).integers(0, 2049, 340)
    for cuts in (NEVER, AS_LENGTHS_SAY):
        pieces = schedule(340, 10, cuts, (2048, 0), (lengths, None))
        check(pieces, blocks_of(340, (2048, 0), (lengths, None)))
        rows = [run.row for piece in pieces for run in piece.runs]
        assert rows == sorted(rows)


@pytest.mark.parametrize(
    ("heads", "topk", "most"), [(16, 2048, 66), (64, 2048, 44), (128, 2048, 22), (64, 512, 13), (64, 128, 0)]
)
def test_few_rows_are_sooner_decoded_than_prefilled(heads, topk, most):
    """From one row on, up to a number: prefill's time is that of one row for all that run at once."""
    assert not decode_plan.sooner_than_prefill(1, 0, topk, sm_count=132)
    sooner = [rows for rows in range(600) if decode_plan.sooner_than_prefill(rows, heads, topk, sm_count=132)]
    assert sooner == list(range(1, most + 1))
