"""vLLM: registers the attention backend `JAX_SPARSE_MLA`, for `--attention-backend JAX_SPARSE_MLA`.

Entry point of `vllm.general_plugins`, run in every process, perhaps more than once. Until the backend is chosen only
its name is registered, and ours are methods of subclasses (`vllm_v32`, `_v4`). Two of vLLM's own functions are replaced
where V4.1's native caches are asked for on SM90 (`vllm_v41`).
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from sparse_mla_torch.plugins.imports import or_leave, when_imported

NAME = "JAX_SPARSE_MLA"
TESTED = ("0.33.",)  # vLLM's versions
V4_MODEL, V41_MODEL = "vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v41.nvidia.model"
_CLASS = "sparse_mla_torch.plugins.vllm_v32.JaxSparseMLABackend"

log = logging.getLogger("vllm.jax_sparse_mla")  # vLLM shows what is below "vllm"


def register() -> None:
    """Registers the backend; leaves a vLLM alone that is not as it was when this was written."""
    or_leave("vLLM", _register, log)


def _register() -> str | None:
    """Why nothing was registered; None if it is."""
    import vllm

    if not vllm.__version__.startswith(TESTED):
        return f"its version {vllm.__version__} is none of {', '.join(f'{x}*' for x in TESTED)}"
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, _CLASS)
    # A spawned process unpickles its configuration before it loads plugins, and would not know the name.
    AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (_member, ())
    for model in (V4_MODEL, V41_MODEL):
        when_imported(model, _choose_v4, log)
    return None


def _member() -> Any:
    """The backend's member of vLLM's enumeration, in the process that unpickles it."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[NAME]


def _choose_v4(model: ModuleType) -> None:
    """Has V4's and V4.1's choice of a layer class know the backend: these models choose by themselves, among vLLM's."""
    theirs = model._select_dsv4_attn_cls
    if hasattr(theirs, "_sparse_mla_torch"):
        return

    def select(vllm_config: Any) -> type:
        chosen = theirs(vllm_config)
        if getattr(vllm_config.attention_config.backend, "name", None) != NAME:
            return chosen
        try:
            from sparse_mla_torch.plugins.vllm_v4 import attention_class
            from sparse_mla_torch.plugins.vllm_v41 import use_records

            ours = attention_class(chosen)
            if model.__name__ == V41_MODEL and ours is not chosen:
                use_records(vllm_config)
            return ours
        except Exception as error:
            log.warning("jax-sparse-mla leaves %s to vLLM: %s: %s", chosen.__name__, type(error).__name__, error)
            return chosen

    select._sparse_mla_torch = theirs
    model._select_dsv4_attn_cls = select
