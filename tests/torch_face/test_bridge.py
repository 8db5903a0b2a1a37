"""The DLPack bridge: shared memory both ways, and its hazards refused by name."""

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparse_mla_torch import bridge, call, to_jax, to_torch
from sparse_mla_torch.bridge import jax_device

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool]


ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON
@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_memory_both_ways(dtype, device):
    tensor = torch.arange(128, device=device).reshape(8, 16).to(dtype)
    array = to_jax(tensor)
    assert array.shape == (8, 16) and array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.device == jax_device(tensor.device)
    if device == "cuda" or tensor.data_ptr() % 64 == 0:  # on a CPU JAX copies what is less aligned
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array)
    assert back.data_ptr() == array.unsafe_buffer_pointer() and back.dtype == dtype and back.device == tensor.device
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@ON
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(dtype, device):
    back = to_torch(to_jax(torch.empty(0, 4, dtype=dtype, device=device)))
    assert back.shape == (0, 4) and back.dtype == dtype and back.device.type == device


def test_hazards_are_refused():
    with pytest.raises(TypeError, match=r"slots is torch.int64.*\.to\(torch.int32\)"):
        to_jax(torch.arange(4), "slots")
    with pytest.raises(TypeError, match="float64"):
        to_jax(torch.zeros(4, dtype=torch.float64))
    for lazy in (torch.ones(3)._neg_view(), torch.ones(3, dtype=torch.complex64).conj()):  # JAX got the memory's signs
        with pytest.raises(ValueError, match=r"lazily negated or conjugated view: pass .resolve_neg\(\)"):
            to_jax(lazy)
    with pytest.raises(ValueError, match="contiguous"):
        to_jax(torch.zeros(4, 8).T)
    with pytest.raises(ValueError, match="detach"):
        to_jax(torch.zeros(4, requires_grad=True))
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        to_jax(np.zeros(4))


def test_an_array_is_kept_until_its_event_has_passed(monkeypatch):
    """Also where another tensor dies in the middle of that, by another thread or the garbage collector."""
    events, capturing = [], False

    class Event:
        done, meanwhile = False, None

        def record(self, stream):
            events.append(self)

        def query(self):
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile:
                meanwhile()
            return self.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(bridge, "_gone", collections.deque())
    monkeypatch.setattr(bridge, "_returning", collections.deque())
    for array in "ab":
        bridge._return_to_jax(array, None)
    events[0].done, events[0].meanwhile = True, lambda: bridge._return_to_jax("c", None)
    bridge._return_to_jax("d", None)
    assert sorted(array for _, array in bridge._returning) == ["b", "c", "d"]
    for event in events:
        event.done = True
    bridge._return_to_jax("e", None)
    assert [array for _, array in bridge._returning] == ["e"]

    capturing, asked = True, len(events)
    bridge._return_to_jax("f", None)
    assert len(events) == asked and [array for _, array in bridge._returning] == ["e"]
    capturing = False
    bridge._return_to_jax("g", None)
    assert [array for _, array in bridge._returning] == ["e", "f", "g"]


@ON
def test_what_torch_owns_is_not_donated(device):
    """On a GPU XLA would update it in place."""
    tensor = torch.zeros(1024, device=device)
    donating = jax.jit(lambda x: x.at[0].set(5), donate_argnums=0)
    if device == "cuda":
        with pytest.raises(jax.errors.JaxRuntimeError, match="external reference"):
            donating(to_jax(tensor))
    else:
        assert donating(to_jax(tensor))[0] == 5
    assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.gpu
def test_unaligned_memory_is_refused():
    with pytest.raises(ValueError, match=r"part starts at 0x\w+4, not 16-byte aligned: pass \.clone"):
        to_jax(torch.zeros(8, device="cuda")[1:], "part")
    assert to_jax(torch.ones(8, device="cuda")[4:]).tolist() == [1] * 4


def test_jax_is_kept_out_of_captures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensor = torch.zeros(64)
    assert to_jax(tensor[:0]).size == 0
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="to_jax: rows is handed over while a CUDA graph is captured"):
        to_jax(tensor, "rows")


def test_devices_have_jax_s_names():
    assert jax_device(torch.device("cpu")) == jax.devices("cpu")[0]
    for device in (torch.device("meta"), torch.device("cuda", 99)):
        with pytest.raises(ValueError, match=f"JAX has no {device} here"):
            jax_device(device)


# Streams. A kernel that sleeps holds torch's back; a chain of products, JAX's.

COUNT = 1 << 24
SLEEP = 400_000_000  # cycles: 0.2 s


@pytest.fixture
def slow():
    """A function that returns its argument, and reads it only after a while."""
    matrix = jax.random.normal(jax.random.key(0), (4096, 4096))

    @jax.jit
    def function(x, matrix):
        for _ in range(60):
            matrix = jnp.tanh(1e-3 * matrix @ matrix)
        return x + 0 * matrix[0, 0]

    jax.block_until_ready(function(jnp.zeros(COUNT), matrix))
    return lambda x: function(x, matrix)


def test_torch_s_current_gpu_stays(monkeypatch):
    """JAX leaves another one current, also where it raises."""
    current = [0]

    def function(x):
        current[0] = 1
        if x.shape[0] > 2:
            raise ZeroDivisionError
        return x

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    call(function, torch.ones(2))
    assert current == [0]
    with pytest.raises(ZeroDivisionError):
        call(function, torch.ones(3))
    assert current == [0]


@pytest.mark.gpu
def test_a_second_gpu_does_not_become_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    torch.cuda.set_device(0)
    tensor = torch.ones(64, device="cuda:1")
    assert call(lambda x: 2 * x, tensor).device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(to_torch(to_jax(tensor)).cpu(), tensor.cpu()) and torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("side_stream", [False, True])
def test_each_waits_for_the_other_s_stream(slow, side_stream):
    with torch.cuda.stream(torch.cuda.Stream() if side_stream else None):
        tensor = torch.zeros(COUNT, device="cuda")
        torch.cuda._sleep(SLEEP)
        tensor.fill_(3)
        out = 5 * to_torch(slow(to_jax(tensor)))
        assert out.min() == out.max() == 15


@pytest.mark.gpu
def test_torch_takes_memory_back_when_jax_has_read_it(slow):
    tensor = torch.ones(COUNT, device="cuda")
    out = slow(to_jax(tensor))
    del tensor
    others = [torch.full((COUNT,), 7.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    out = to_torch(out)
    assert out.min() == out.max() == 1 and len(others) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("through_a_view", [False, True])
def test_jax_takes_memory_back_when_torch_has_read_it(through_a_view):
    fill = jax.jit(lambda value: jnp.full(COUNT, value))
    others = [fill(7.0)]
    array = jax.block_until_ready(fill(1.0))
    pointer, tensor = array.unsafe_buffer_pointer(), to_torch(array)
    del array
    if through_a_view:
        tensor = tensor[1:]
    torch.cuda._sleep(SLEEP)
    out = tensor.clone()
    del tensor
    others += [fill(7.0) for _ in range(8)]
    jax.block_until_ready(others)
    assert out.min() == out.max() == 1
    to_torch(fill(2.0))  # the next tensor to die: what torch is done with goes back
    others += [fill(7.0) for _ in range(8)]
    assert pointer in [x.unsafe_buffer_pointer() for x in others]


def test_call_converts_trees():
    def function(x, *, pair):
        return {"sum": x + pair[0], "rest": pair[1]}

    out = call(jax.jit(function), torch.ones(3), pair=(torch.ones(3), jnp.zeros(2)))
    assert torch.equal(out["sum"], torch.full((3,), 2.0)) and torch.equal(out["rest"], torch.zeros(2))
