"""The request tables: which slots belong to whom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.serving.pages import OutOfPages, RequestPool


def snapshot(pool):
    """What is free, and what the tables say; equal before and after everything was given back."""
    return (
        sorted(pool.pages.free),
        sorted(pool.swa_pages.free),
        sorted(pool._free_rows),
        pool.req_to_token.tolist(),
        pool.full_to_swa.tolist(),
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pool_against_brute_force(data):
    """Random requests: no slot belongs to two tokens, every visible token has a window slot of its own, page 0 is
    nobody's, devices take turns, and at the end everything is free again."""
    page, max_len, max_requests = 4, 22, 3
    window, devices = data.draw(st.sampled_from([None, 1, 3, 4, 5, 9])), data.draw(st.sampled_from([1, 2, 4]))
    sizes = {"max_requests": max_requests, "max_len": max_len, "page_size": page}
    pool = RequestPool(**sizes, window=window, seed=0, devices=devices)
    before, lengths, oldest = snapshot(pool), {}, {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "extend", "extend", "truncate", "close"]))
        if action == "open" and len(lengths) < max_requests:
            row = pool.open()
            assert row not in lengths and (pool.req_to_token[row] == -1).all()
            lengths[row] = oldest[row] = 0
        elif action == "close" and lengths:
            row = data.draw(st.sampled_from(sorted(lengths)))
            pool.close(row)
            del lengths[row]
        elif action == "truncate" and lengths:
            row = data.draw(st.sampled_from(sorted(lengths)))
            # Rejected drafts are newer than what the window has moved past.
            lengths[row] = data.draw(st.integers(oldest[row], lengths[row]))
            kept = pool.req_to_token[row, : lengths[row]].copy()
            pool.truncate(row, lengths[row])
            assert np.array_equal(pool.req_to_token[row, : lengths[row]], kept)
            assert (pool.req_to_token[row, -(-lengths[row] // page) * page :] == -1).all()
        elif action == "extend" and lengths:
            row = data.draw(st.sampled_from(sorted(lengths)))
            old, new = lengths[row], min(max_len, lengths[row] + data.draw(st.integers(1, 9)))
            if new == old:
                continue
            slots = pool.extend(row, old, new)
            lengths[row], oldest[row] = new, old
            assert slots.dtype == np.int32 and np.array_equal(slots, pool.req_to_token[row, old:new])
            if window is not None:
                first = max(0, old + 1 - window)  # what the step's oldest query still sees
                assert (pool.full_to_swa[pool.req_to_token[row, first:new]] >= page).all()
                assert (pool.full_to_swa[pool.req_to_token[row, : first // page * page]] == -1).all()
        for row in lengths:  # each device has its turn of a request's pages
            assert all(number % devices == i % devices for i, number in enumerate(pool.pages_of(row)))
        held = np.concatenate([pool.req_to_token[row, :length] for row, length in lengths.items()] or [[]])
        assert len(set(held)) == len(held) and (held >= page).all() and (held < pool.num_pages * page).all()
        mapped = pool.full_to_swa[1:][pool.full_to_swa[1:] >= 0]
        assert len(set(mapped)) == len(mapped) and (mapped >= page).all()
        assert (mapped < pool.num_swa_pages * page).all()
        assert pool.full_to_swa[0] == 0 and pool.full_to_swa[-1] == -1
    for row in lengths:
        pool.close(row)
    assert snapshot(pool) == before


def test_pool_holds_only_the_window_of_a_long_request():
    """With one page for the window and one for what is added, a request of any length fits."""
    pool = RequestPool(max_requests=1, max_len=64, page_size=4, window=3, seed=0)
    for _ in range(pool.swa_pages.available - 3):
        pool.swa_pages.take()
    row = pool.open()
    for length in range(64):
        pool.extend(row, length, length + 1)
    pool.close(row)
    assert len(pool.swa_pages.free) == 3


def test_a_full_pool_says_so():
    pool = RequestPool(max_requests=1, max_len=8, page_size=4, window=None, seed=0)
    row = pool.open()
    with pytest.raises(RuntimeError, match="a request of 9 tokens exceeds the pool's 8"):
        pool.extend(row, 0, 9)
    while pool.pages.available:
        pool.pages.take()
    with pytest.raises(OutOfPages, match="1 pages are needed, 0 are free"):
        pool.extend(row, 0, 1)
    with pytest.raises(OutOfPages, match="no free page left"):
        pool.pages.take()


def test_devices_run_out_of_pages_one_by_one():
    """Of the pages that two devices share, a request that needs one of each is not served by two of the second."""
    pool = RequestPool(max_requests=3, max_len=16, page_size=4, window=None, seed=0, num_pages=6, devices=2)
    assert pool.most_pages == 4 and pool.pages.available == 4 and pool.turns(3) == 4
    long, short = pool.open(), pool.open()
    pool.extend(long, 0, 12)  # two pages of device 0, and its last
    assert pool.pages.available == 0 and len(pool.pages.free) == 2 and {p % 2 for p in pool.pages.free} == {1}
    with pytest.raises(OutOfPages, match="1 pages are needed"):
        pool.extend(short, 0, 4)
    pool.extend(long, 12, 16)  # of device 1
    page = pool.pages_of(long)[2]
    pool.pages.keep(page)
    pool.truncate(long, 8)
    assert pool.pages.idle == [page] and pool.pages.is_idle(page)
    evicted = []
    pool.pages.on_evict = evicted.append
    pool.extend(short, 0, 4)
    assert evicted == [page] == pool.pages_of(short)


def test_changes_name_each_entry_once():
    """What a request mapped before it was closed is left out: a device writes changes in any order."""
    pool = RequestPool(max_requests=2, max_len=8, page_size=4, window=4, seed=0)
    first, second = pool.open(), pool.open()
    pool.extend(first, 0, 8)
    pool.close(first)
    pool.extend(second, 0, 4)  # takes a page that the first one had
    assert pool.open() == first
    pool.extend(first, 0, 4)
    changes = pool.take_changes().tolist()
    pages = [*pool.pages_of(second), *pool.pages_of(first)]
    assert changes == [[row, 0, page, pool.swa_page(page)] for row, page in zip((second, first), pages)]
    assert not len(pool.take_changes())
