"""vLLM's own classes, loaded with our plugin as vLLM loads it, over CPU tensors: one line of JSON for each case.

`test_vllm.py` runs this and judges it. vLLM's metadata builders, index conversions and gathers run as they are (its
Triton kernels in Triton's interpreter). Our kernels' place takes the reference, as always on a CPU; what is tested is
what vLLM hands over and takes back. Where vLLM calls a compiled operator of its own, torch does the same here.

    python tests/engines/drive_vllm.py choice|v32|bf16|v4|v41|left|chunks
"""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import pickle
import sys
from types import SimpleNamespace as Facts

import vllm_without_gpu  # isort: split

import torch
import vllm.config.vllm as vllm_config
from quiet import Quiet
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_layers import OURS, V4, V32, V41, LayerCall, sizes, slots_of

from benchmarks.engines import difference, served

CPU = torch.device("cpu")


def report(case: str, **facts) -> None:
    print(json.dumps({"case": case, **facts}), flush=True)


def run(case: str, call: LayerCall) -> None:
    from sparse_mla_torch.plugins import calls

    calls.counts.clear()
    found = call.function()
    error = difference(found, call.wanted)
    report(case, error=error, served=served(), shape=list(found.shape), page_bytes=call.page_bytes)


# --- the choice of a backend ---------------------------------------------------------------------------------------


def choice() -> None:
    import vllm.plugins
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.selector import get_attn_backend

    vllm.plugins.plugins_loaded = False
    load_general_plugins()  # again, as vLLM may in one process
    member = AttentionBackendEnum.JAX_SPARSE_MLA
    config = AttentionConfig(backend="jax_sparse_mla")
    report("registered", path=member.get_path(), chosen=config.backend.name, jax="jax" in sys.modules)

    process = multiprocessing.get_context("spawn").Process(target=in_a_worker, args=(config,))
    process.start()
    process.join()
    copies = [copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    report("a worker's configuration", exit=process.exitcode, copies=[x.backend is member for x in copies])

    def selected(backend, cache: str = "fp8_ds_mla", head_size: int = 576) -> str:
        vllm_config._current_vllm_config = sizes(
            cache_config=Facts(user_specified_block_size=False, cache_dtype=cache, block_size=64),
            kv_transfer_config=None,
            attention_config=Facts(use_non_causal=False, backend=backend, backend_per_kind={}),
            model_config=Facts(rswa_window=None, hf_text_config=Facts(index_topk=2048, qk_rope_head_dim=64)),
        )
        try:
            options = {"use_mla": True, "use_sparse": True, "num_heads": 128}
            return get_attn_backend(head_size, torch.bfloat16, cache, **options).__name__
        except ValueError as refusal:
            return str(refusal)
        finally:
            vllm_config._current_vllm_config = None

    from vllm.model_executor.layers.attention.mla_attention import _canonicalize_sparse_mla_kv_cache_dtype

    cache = _canonicalize_sparse_mla_kv_cache_dtype(member.get_class(), "fp8")
    other = selected(AttentionBackendEnum.FLASHMLA_SPARSE)
    report("V3.2", fp8=selected(member), bf16=selected(member, "bfloat16"), other=other, cache=cache)

    import vllm.models.deepseek_v4.nvidia.flashmla as layer
    import vllm.models.deepseek_v4.nvidia.model as model

    before = dict(vars(layer))
    names = {}
    for backend in (None, AttentionBackendEnum.FLASHMLA_SPARSE, member):
        chosen = model._select_dsv4_attn_cls(Facts(attention_config=Facts(backend=backend)))
        names[getattr(backend, "name", "none")] = [chosen.__name__, chosen.get_padded_num_q_heads(16)]
    unchanged = all(vars(layer).get(name) is value for name, value in before.items())
    report("V4", classes=names, module_unchanged=unchanged)


def in_a_worker(config) -> None:
    """vLLM's workers unpickle their configuration before they load plugins."""
    assert config.backend is AttentionBackendEnum.JAX_SPARSE_MLA, config.backend
    assert config.backend.get_path().startswith("sparse_mla_torch.")


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------------------------


def gather_by_torch(*arguments) -> None:
    """vLLM's cp_gather_and_upconvert_fp8_kv_cache."""
    from sparse_mla_torch import ops

    cache, out, table, starts, requests = arguments
    ends = [*starts.tolist()[1:], len(out)]
    for i in range(requests):
        first, last = int(starts[i]), int(ends[i])
        slots = slots_of(table, i, torch.arange(last - first), cache.shape[1])
        out[first:last] = ops.gather_kv(cache.unsqueeze(2), slots.int())


def stand_in_for_v32s_operators() -> None:
    from vllm.v1.attention.backends.mla import flashmla_sparse, index_group

    index_group._create_side_stream = lambda device: Quiet()
    index_group._create_event = Quiet
    index_group.current_stream = flashmla_sparse.current_stream = Quiet
    operators = vllm_without_gpu._custom_ops
    operators.concat_mla_q = lambda nope, rope, out: torch.cat([nope, rope], -1, out=out)
    operators.cp_gather_and_upconvert_fp8_kv_cache = gather_by_torch
    zeros = torch.zeros
    torch.zeros = lambda *args, pin_memory=False, **options: zeros(*args, **options)


def as_on_sm90() -> None:
    """Has few rows of prefill decoded, as where our SM90 kernels are; here the reference decodes."""
    from sparse_mla_torch.plugins import short_prefill

    from jax_sparse_mla.device import DeviceInfo

    short_prefill.device_info = lambda device: DeviceInfo("cuda", (9, 0), 132, 232_448)
    short_prefill.missing = lambda *_: None
    decode = short_prefill.decode

    def counted(*args, **kwargs):
        found = decode(*args, **kwargs)
        report(f"{len(args[0])} rows of prefill", decoded=found is not None)
        return found

    short_prefill.decode = counted


def bf16() -> None:
    """vLLM decodes from bfloat16 rows by FlashMLA's prefill."""
    stand_in_for_v32s_operators()
    as_on_sm90()
    for heads in (16, 64):
        layer = V32(heads, OURS, CPU, topk=2048, fp8=False)
        run(f"decode, {heads} heads", layer.call([1, 1, 1], [70, 200, 129]))
        run(f"mixed, {heads} heads", layer.call([1, 1, 150], [70, 200, 150]))


def chunks() -> None:
    """Chunks of prefill as where our SM90 kernel prefills; here the reference does. And which heads are prepared."""
    from sparse_mla_torch.plugins import calls, vllm_v32

    warmed = []
    calls.warm_up = lambda *shape: warmed.append(shape)
    stand_in_for_v32s_operators()
    for able in (False, True):
        vllm_v32.is_hopper_s = lambda device, able=able: able
        layer = V32(16, OURS, CPU)
        for rows, keys in ((300, 300), (200, 200)):
            call = layer.call([1, 1, rows], [70, 200, keys])
            run(f"{rows} of {keys} tokens, {'ours' if able else 'vLLM'} prefills", call)
    layer = V32(16, OURS, CPU, max_len=1 << 20)
    metadata = Facts(num_decode_tokens=0, num_decodes=0)
    batch = Facts(num_actual_tokens=300, seq_lens_cpu_upper_bound=torch.tensor([512 * 300]))
    report("few rows of many tokens", gathered=vllm_v32._is_worth_a_gather(batch, metadata))

    def gathering(impl, *args) -> None:
        impl.pcp_dcp_kv_gather, impl.dcp_world_size, impl.pcp_world_size = True, 8, 2

    vllm_v32.FlashMLASparseImpl.__init__ = gathering
    vllm_config._current_vllm_config.parallel_config.tensor_parallel_size = 4
    vllm_v32.JaxSparseMLAImpl(16, 576)
    report("heads", warmed=warmed)


def v32() -> None:
    stand_in_for_v32s_operators()
    for heads in (16, 64):
        layer = V32(heads, OURS, CPU)
        run(f"decode, {heads} heads", layer.call([1, 1, 1], [70, 200, 129]))
        run(f"two tokens, {heads} heads", layer.call([2, 2, 2], [70, 200, 129]))
        run(f"mixed, {heads} heads", layer.call([1, 1, 150], [70, 200, 150]))


# --- DeepSeek-V4 ---------------------------------------------------------------------------------------------------


def v4() -> None:
    for heads in (16, 64):
        layers = V4(heads, OURS, CPU)
        for ratio in (1, 4, 128):
            run(f"decode, ratio {ratio}, {heads} heads", layers.call(ratio, [1, 1, 1], [70, 300, 513]))
            run(f"mixed, ratio {ratio}, {heads} heads", layers.call(ratio, [1, 1, 40], [70, 600, 300]))


def v41() -> None:
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert
    from vllm.models.deepseek_v41.nvidia import model

    other = Facts(cache_dtype="fp8_ds_mla")
    for backend in (AttentionBackendEnum.FLASHMLA_SPARSE, AttentionBackendEnum.JAX_SPARSE_MLA):
        config = sizes(attention_config=Facts(backend=backend), cache_config=other)
        chosen = model._select_dsv4_attn_cls(config).__name__
        report(backend.name, layer=chosen, records=attention._use_v41_mxfp8_kv_record())
    for heads in (16, 64):
        layers = V41(heads, OURS, CPU)
        for ratio in (0, 1, 2):
            run(f"decode, ratio {ratio}, {heads} heads", layers.call(ratio, [1, 1, 1], [70, 300, 513]))
            run(f"mixed, ratio {ratio}, {heads} heads", layers.call(ratio, [1, 1, 40], [70, 600, 300]))
    report("after", records=attention._use_v41_mxfp8_kv_record(), layer=layers.layer_class.__name__)

    from sparse_mla_torch import ops

    latents, no_rotation = torch.randn(64, 512).bfloat16(), torch.cat([torch.ones(64, 32), torch.zeros(64, 32)], 1)
    cache, slots = layers.cache(1, 64, 1), torch.arange(64)
    rope_quant_insert(latents, slots, no_rotation, cache, slots, 1)
    report("writer", error=difference(ops.gather_kv(cache.unsqueeze(2), slots.int(), "V41_FP4"), latents.float()))


# --- what is left to vLLM ------------------------------------------------------------------------------------------


def left() -> None:
    """Ours refuses every call: vLLM's functions get theirs as vLLM makes them, with as many heads as they take."""
    import vllm.models.deepseek_v4.nvidia.flashmla as v4_layer
    import vllm.v1.attention.backends.mla.flashmla_sparse as v32_layer
    from sparse_mla_torch import flash_mla

    ours, asked = {name: getattr(flash_mla, name) for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")}, []

    def theirs(name):
        def function(*args, **arguments):
            heads = (args[0] if args else arguments["q"]).shape[-2]
            assert heads in (64, 128), f"{name} of {heads} heads would end the process"
            asked.append(name)
            return ours[name](*args, **arguments)

        function.__signature__ = inspect.signature(getattr(v4_layer, name))
        return function

    def refuse(*args, **arguments):
        raise ValueError("ours refuses this")

    for name in ours:
        for layer in (v4_layer, v32_layer):
            setattr(layer, name, theirs(name))
        setattr(flash_mla, name, refuse)
    stand_in_for_v32s_operators()
    for heads in (16, 64):
        run(f"left, V3.2 mixed, {heads} heads", V32(heads, OURS, CPU).call([1, 1, 150], [70, 200, 150]))
    run("left, V4 mixed, ratio 4, 16 heads", V4(16, OURS, CPU).call(4, [1, 1, 40], [70, 600, 300]))
    report("left", asked=asked)


if __name__ == "__main__":
    torch.manual_seed(0)
    load_general_plugins()
    cases = {"choice": choice, "v32": v32, "bf16": bf16, "v4": v4, "v41": v41, "left": left, "chunks": chunks}
    cases[sys.argv[1]]()
