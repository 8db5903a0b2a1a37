"""The pieces of benchmarks/step.py at a small size: its programs are in place and whole, its bookkeeping is right."""

import dataclasses
import functools
import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import record, stack, step
from benchmarks.stack import V4_FLASH_RATIOS, Stack, fill
from benchmarks.step import Operation, Program, Steps
from jax_sparse_mla import DEEPSEEK_V4_FLASH

SMALL = dataclasses.replace(DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=16)


def test_v4_flash_has_43_layers_21_of_them_with_an_indexer():
    assert len(V4_FLASH_RATIOS) == 43
    assert [V4_FLASH_RATIOS.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert V4_FLASH_RATIOS[:5] == (0, 0, 4, 128, 4) and V4_FLASH_RATIOS[-1] == 4


def test_pages_and_windows_are_each_requests_own():
    stack = Stack(batch=3, max_len=2000, window_pages=2)
    tables = stack.tables()
    slots = np.asarray(tables.req_to_token)
    assert slots.shape == (3, 2000) and len(np.unique(slots)) == slots.size and slots.min() >= 256
    swa = np.asarray(tables.full_to_swa)[slots]
    for position in (200, 255, 256, 1999):  # no other token within the window or of another request has the slot
        window = swa[:, max(0, position - 127) : position + 1]
        assert len(np.unique(window)) == window.size
    assert swa.max() < stack.empty_caches()[0].swa.num_slots and np.asarray(tables.full_to_swa)[-1] == -1


@pytest.fixture(scope="module")
def decode():
    small = Stack(spec=SMALL, ratios=(0, 4, 4), batch=2, max_len=512)
    return Program(small, "decode", 2).lower().compile()


def test_a_decode_step_is_in_place(decode):
    """Layers of a ratio share their arrays: none is copied between two of them."""
    assert len(jax.tree.leaves(jax.eval_shape(decode.stack.empty_caches))) == 8
    report = decode.in_place
    counter_and_output = 2 * 4 + 2 * SMALL.num_heads * SMALL.v_dim * 2
    assert report["alias_bytes"] == report["cache_bytes"] + counter_and_output
    assert report["copies"] == report["conditionals"] == 0
    steps = Steps(decode, fill(decode.stack, decode.stack.empty_caches()))
    steps.start(300)
    enqueued, done = steps(3)
    assert 0 < enqueued <= done and not steps.moved()
    assert np.asarray(steps.state[1]).tolist() == [303, 303]
    out = np.asarray(steps.state[2], np.float32)
    assert np.isfinite(out).all() and out.any()


def test_copies_of_a_cache_are_counted():
    """Without donation every cache is copied before it is written."""
    small = Stack(spec=SMALL, ratios=(128,), batch=2, max_len=512)
    program = Program(small, "decode", 2)
    shapes = jax.eval_shape(lambda: (program.state(small.empty_caches(), 0), *program.inputs()))
    hlo = jax.jit(functools.partial(stack.decode_step, small)).lower(*shapes).compile().as_text()
    caches = jax.tree.leaves(jax.eval_shape(small.empty_caches))
    assert step.count_copies(hlo, caches) >= len(caches) == 4


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ('  %copy.3 = u8[7,512]{1,0} copy(%param.1), metadata={op_name="a"}', 1),
        ("  ROOT %c = f32[2,8]{1,0:S(1)} copy(f32[2,8]{1,0} %p)", 1),
        ("  %s = (u8[7,512]{1,0}, u8[7,512]{1,0}, u32[]) copy-start(%p)", 1),
        ("  %f = u8[7,512]{1,0} fusion(%copy.3, %copy.4), kind=kLoop", 0),
        ("  %copy.5 = u8[7,256]{1,0} copy(%p)", 0),  # no cache has this shape
    ],
)
def test_a_copy_is_told_by_its_shape(line, copies):
    arrays = [jax.ShapeDtypeStruct((7, 512), jnp.uint8), jax.ShapeDtypeStruct((2, 8), jnp.float32)]
    assert step.count_copies(line, arrays) == copies


def test_no_layer_is_dead(decode):
    """Every layer's sink reaches the step's output: XLA cannot have dropped its attention."""
    rows, params, tables = decode.inputs()

    def output(params):
        caches = fill(decode.stack, decode.stack.empty_caches())
        return np.asarray(decode.compiled(decode.state(caches, 300), rows, params, tables)[2])

    before = output(params)
    for ratio, of_ratio in params.items():
        heads = decode.stack.spec.num_heads
        for layer in range(of_ratio.num_layers):
            # Nothing but the sink is left of the layer: on a GPU a smaller change is lost in the FP8 keys above it.
            sinks = of_ratio.attn_sink.at[layer * heads : (layer + 1) * heads].set(jnp.inf)
            changed = params | {ratio: dataclasses.replace(of_ratio, attn_sink=sinks)}
            assert (output(changed) != before).any(), (ratio, layer)


@pytest.mark.long
def test_prefill_counts_its_tokens():
    stack = Stack(spec=SMALL, ratios=(0, 128), max_len=512, window_pages=2)
    program = Program(stack, "prefill", 256).lower().compile()
    assert program.in_place["copies"] == 0
    steps = Steps(program, stack.empty_caches(), jnp.int32(300))
    steps.start(0)
    steps(2)
    assert int(steps.state[1]) == 300 and not steps.moved()
    out = np.asarray(steps.state[2], np.float32)
    assert out[:44].any() and not out[44:].any()  # the second chunk has 44 tokens; the rest is padding


OPERATIONS = [
    Operation("loop_fusion_1", 0, 10, 1),
    Operation("a_kernel", 5, 20, 1),  # both run at once for a while
    Operation("a_kernel", 30, 40, 2),
    Operation("loop_fusion_2", 31, 35, 3),  # within another one
]


def test_busy_time_and_graphs():
    assert step.busy_time(OPERATIONS) == 30
    assert step.from_graphs(OPERATIONS) == OPERATIONS[:2]
    summary = step.summary(OPERATIONS, steps=2)
    assert summary == {"gpu_us": 0.015, "gpu_busy": 30 / 40, "operations": 2, "from_graphs": 0.5}


def test_operations_are_grouped_by_kernel_and_jax_operation(monkeypatch):
    names = {"loop_fusion_1": "jit(f)/add", "loop_fusion_2": "jit(f)/add"}
    monkeypatch.setattr(Program, "operation_names", lambda self: names)
    program = Program(Stack(), "decode", 1)
    kinds = step.by_kind(program, OPERATIONS, steps=2)
    assert kinds == [(0.0125, 1, 0.5, "a_kernel"), (0.007, 1, 0.5, "loop_fusion: jit(f)/add")]


def test_a_run_keeps_the_cases_of_the_same_code(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path / "now"))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    before = {"code": record.code_digest(), "results": {"before": {"wall_us": 0.5, "command": "long ago"}}}
    record.write_json(tmp_path / "step.json", before)
    record.write_json(tmp_path / "other.json", before | {"code": "another"})
    where = {"device": "a GPU", "commit": "abc", "code": record.code_digest(), "command": "first"}
    step.save("step", {"one": {"wall_us": 1.0}, "two": {"wall_us": 2.0}}, [], where)
    step.save("step", {"two": {"wall_us": 3.0}}, [], {**where, "command": "second"})
    step.save("other", {"two": {"wall_us": 3.0}}, [], where)
    saved = json.loads((tmp_path / "now" / "step.json").read_text())
    assert saved["device"] == "a GPU" and saved["commit"] == "abc"
    assert {name: (r["wall_us"], r["command"]) for name, r in saved["results"].items()} == {
        "before": (0.5, "long ago"),
        "one": (1.0, "first"),
        "two": (3.0, "second"),
    }
    assert set(json.loads((tmp_path / "now" / "other.json").read_text())["results"]) == {"two"}


def test_the_cases_name_their_programs():
    arguments = types.SimpleNamespace(
        layers=3, decode="1x512,4x1024@xla_a=true&JAX_B=c", prefill="600/256,300/256,600/512", long=""
    )
    decode, prefill, long = step.programs(arguments)
    assert [p.num_rows for p in decode.values()] == [1, 4] and long == {}
    assert [p.options for p in decode.values()] == [{}, {"xla_a": True, "JAX_B": "c"}]
    assert prefill[600, 256] is prefill[300, 256] is not prefill[600, 512]
    assert prefill[600, 256].stack.max_len == 768 and jax.tree.leaves(prefill[600, 256].stack.ratios) == [0, 0, 4]


def test_environment_variables_hold_inside(monkeypatch):
    monkeypatch.setenv("JAX_SPARSE_A", "before")
    with pytest.raises(KeyError), step.variables({"JAX_SPARSE_A": "inside", "JAX_SPARSE_B": "2"}):
        assert (os.environ["JAX_SPARSE_A"], os.environ["JAX_SPARSE_B"]) == ("inside", "2")
        raise KeyError
    assert os.environ["JAX_SPARSE_A"] == "before" and "JAX_SPARSE_B" not in os.environ


def test_staggered_requests_differ_in_length():
    small, first = Stack(batch=3, max_len=512), 512 - step.ROOM
    assert step.decode_start(small, False).tolist() == [first] * 3
    assert step.decode_start(small, True).tolist() == [first, first - 1, first - 2]
    lengths = Program(small, "decode", 3).state([], step.decode_start(small, True))[1]
    assert lengths.dtype == jnp.int32 and lengths.tolist() == [first, first - 1, first - 2]


@pytest.mark.parametrize("repeats", [1, 5, 9, 30])
def test_a_case_ends_before_its_bucket_is_full(repeats, monkeypatch):
    """And the host's time is that of steps behind an idle device: in longer runs it waits."""

    class Steps:
        done = 0

        def start(self, tokens):
            self.done = 0

        def __call__(self, count):
            self.done += count
            return count * 30e-6 if count <= step.BURST else count * 900e-6, count * 1e-3

        def moved(self):
            return False

    def operations(run):
        run()
        return [step.Operation("kernel", 0, 500, 1)]

    monkeypatch.setattr(step, "device_operations", operations)
    steps = Steps()
    found, _ = step.measure(steps, 0, step.timed_steps(repeats), repeats, rewind=False)
    assert steps.done <= step.ROOM and found["steps"] == min(50, (360 - 51) // (repeats + 1))
    assert found["host_us"] == pytest.approx(30) and found["wall_us"] == pytest.approx(1000)
