"""The config of a model beyond its `ModelSpec`, read from a checkpoint's `config.json`.

Both transformers' keys and those of the released checkpoints are read. A value that the model code has no branch for is
refused by its name, so that no checkpoint runs as something else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from jax_sparse_mla.models import (
    ModelSpec,
    check_types,
    indexed_layers,
    is_int,
    rope_parameters,
    text_config,
    yarn_mscale,
)

SCORES = ("sqrtsoftplus", "softmax", "sigmoid")
V4_RATIOS = (0, 4, 128)
V4_MLPS = ("hash_moe", "moe")
LATENT_MLPS = ("dense", "sparse")
# Whether layers of a kind have linear attention; the last two names are those of released configs.
GLM53_LAYERS = {
    "linear_attention": True,
    "indexed_attention": False,
    "full_attention": False,
    "deepseek_sparse_attention": False,
}

# FP8 weights have a scale for each block of so many rows and columns.
WEIGHT_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding of `dim` values; with a factor above 1 its frequencies are YaRN's (arXiv 2309.00071, §3.2)."""

    dim: int  # rotated values of a head, two for each frequency
    theta: float  # the base of the frequencies
    factor: float = 1.0  # by how much YaRN extends `original_len` tokens; 1 is plain rope
    original_len: int = 0
    # Rotations over `original_len` above which a frequency stays, and below which it is divided.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0  # what cos and sin are multiplied by

    def inv_freq(self) -> np.ndarray:
        """float32 `[dim / 2]`, radians per position."""
        pairs = np.arange(self.dim // 2)
        freq = self.theta ** -(2 * pairs / self.dim)
        if self.factor == 1:
            return freq.astype(np.float32)

        def pair_with(rotations: float) -> float:
            """The pair, as a real number, that turns so often within `original_len` tokens."""
            return self.dim * math.log(self.original_len / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(pair_with(self.beta_fast)), 0)
        high = min(math.ceil(pair_with(self.beta_slow)), self.dim - 1)
        divided = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        return (freq * (1 - divided) + freq / self.factor * divided).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Experts and how rows are sent to them."""

    num_experts: int
    top_k: int  # experts that a row goes to
    width: int  # hidden values of a routed expert
    shared_width: int  # hidden values of the shared expert
    score: str  # how logits become scores, one of SCORES
    scale: float  # what the chosen scores are multiplied by
    normalised: bool = True  # whether the chosen scores are divided by their sum
    groups: int = 1  # experts are in so many groups
    top_groups: int = 1  # and chosen from the best of these
    limit: float | None = None  # bound of the SwiGLU's inputs; None has no bound
    float32_router: bool = True  # else the router's product has the rows' dtype, as in transformers' V4

    def __post_init__(self):
        limits = {"num_experts_per_tok": (self.top_k, self.num_experts), "topk_group": (self.top_groups, self.groups)}
        for name, (value, most) in limits.items():
            if not 1 <= value <= most:
                raise ValueError(f"Model.from_config: {name} must be from 1 to {most}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections:
    """Manifold-constrained hyper-connections: residual streams, Sinkhorn steps, the floor of what they divide by, and
    whether a head of weights joins the last streams; else it is their mean."""

    streams: int
    iterations: int
    eps: float
    has_head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDA:
    """Linear attention, see `serving.kda`."""

    heads: int
    head_dim: int
    kernel: int  # tokens of the convolution
    lower_bound: float | None  # of the decay; None without one


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter:
    """DSpark's drafter, see `serving.dspark`."""

    targets: tuple[int, ...]  # the model's layers whose output it reads, in order; it has as many stages
    block: int  # tokens that it drafts at once, as trained
    noise: int  # the token that stands for each of them but the first
    markov_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """The common part of all configs."""

    spec: ModelSpec  # the attention constants
    vocab_size: int
    hidden_size: int
    num_layers: int
    q_rank: int  # values between the two projections of the queries
    moe: MoE
    norm_eps: float  # of the RMSNorms
    tied: bool  # whether the logits' weights are the embedding's
    eos_token_ids: tuple[int, ...]  # tokens that end a sequence
    ratios: tuple[int, ...]  # the compress ratio of each layer, 0 where nothing is compressed
    streams: HyperConnections | None = None  # None where there is one residual stream
    # The mesh axis over which heads and experts are cut, under `jax.shard_map`; the heads and output groups here are
    # then those of one device. None: nothing is cut.
    axis_name: str | None = None
    float32_norms = False  # whether the weights of the norms are float32, else in the model's dtype

    @property
    def loops(self) -> bool:
        """Whether a loop can run over layers: not where they pass on what one of them has selected."""
        return True

    @property
    def selecting(self) -> tuple[int, ...]:
        """The layers that select for themselves, in order."""
        return tuple(range(self.num_layers))

    @property
    def query_dim(self) -> int:
        """Values of a head's query as the projection makes it."""
        return self.spec.qk_dim

    @property
    def shared_counts(self) -> dict[str, int]:
        """Counts that the devices of a mesh share evenly, by their names in messages."""
        return {"heads": self.spec.num_heads, "experts": self.moe.num_experts}

    def cut(self, n: int, axis_name: str) -> Self:
        """The config of one of n devices, which share `shared_counts`."""
        spec = dataclasses.replace(self.spec, num_heads=self.spec.num_heads // n)
        return dataclasses.replace(self, spec=spec, axis_name=axis_name)

    @property
    def pools(self) -> tuple[Hashable, ...]:
        """A name for each layer: layers of the same name have their caches in the same arrays."""
        return ("sparse",) * self.num_layers

    def number_in_pool(self, i: int) -> int:
        """The number of layer i among those of its pool."""
        return self.pools[:i].count(self.pools[i])


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4Config(_Config):
    """DeepSeek-V4."""

    hashed: tuple[bool, ...]  # whether a layer's experts follow from the token's number
    o_groups: int  # of the grouped output projection, as o_rank
    o_rank: int
    window_rope: Rope  # of layers of ratio 0
    compress_rope: Rope  # of the others
    block_drafter: BlockDrafter | None = None
    float32_norms = True

    @property
    def pools(self) -> tuple[int, ...]:
        return self.ratios

    @property
    def selecting(self) -> tuple[int, ...]:
        return tuple(i for i, ratio in enumerate(self.ratios) if self.spec.kind(ratio).selects == "own")

    @property
    def shared_counts(self) -> dict[str, int]:
        return super().shared_counts | {"output groups": self.o_groups}

    def cut(self, n: int, axis_name: str) -> Self:
        return dataclasses.replace(super().cut(n, axis_name), o_groups=self.o_groups // n)

    def layer_kind(self, i: int) -> tuple[int, str]:
        """A layer's compress ratio, and "moe" or "hash" for its experts; behind the last one drafts' are."""
        return (self.ratios[i], "hash" if self.hashed[i] else "moe") if i < self.num_layers else (0, "moe")

    def rope(self, ratio: int) -> Rope:
        """The rotary embedding of a layer of this ratio."""
        return self.compress_rope if ratio else self.window_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(_Config):
    """The common part of models whose attention is V3.2's."""

    dense: tuple[bool, ...]  # whether a layer has one wide MLP instead of experts
    dense_width: int  # hidden values of the wide MLP
    # Values of a head's key without rope and of its value, before they are multiplied into the latent space
    # (`spec.nope_dim` and `spec.v_dim` are those of the latent).
    nope_dim: int
    v_dim: int

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.spec.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Config(LatentConfig):
    """DeepSeek-V3.2, and GLM-5, which has its architecture."""

    rope: Rope
    index_interleaved: bool  # whether the indexer rotates neighbours, as attention does, instead of two halves
    indexed: tuple[bool, ...]  # whether a layer has an indexer; else it takes what the last one with it selected

    @property
    def loops(self) -> bool:
        return all(self.indexed)

    @property
    def selecting(self) -> tuple[int, ...]:
        return tuple(i for i, indexed in enumerate(self.indexed) if indexed)

    def layer_kind(self, i: int) -> tuple[bool, str]:
        """Whether a layer has an indexer, and "moe" or "dense"; behind the last one is the draft layer."""
        return (self.indexed[i], "dense" if self.dense[i] else "moe") if i < self.num_layers else (True, "moe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm53Config(LatentConfig):
    """GLM-5.3-Flash: layers of linear attention, and of V3.2's with pools of index keys and without rope."""

    linear: tuple[bool, ...]  # whether a layer has linear attention
    kda: KDA

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple("linear" if is_linear else "sparse" for is_linear in self.linear)

    @property
    def selecting(self) -> tuple[int, ...]:
        return tuple(i for i, is_linear in enumerate(self.linear) if not is_linear)

    def layer_kind(self, i: int) -> tuple[bool, str]:
        """Whether a layer has linear attention, and "moe" or "dense"."""
        return self.linear[i], "dense" if self.dense[i] else "moe"


Config: TypeAlias = V4Config | V32Config | Glm53Config
_C = TypeVar("_C")


def read_config(config: Mapping[str, Any]) -> Config:
    """The config of a `config.json` mapping.

    Raises:
      ValueError: see `Model.from_config`; a missing key, or one with a value of the wrong type, is named.
    """
    try:
        return _read_config(config)
    except ArithmeticError as error:
        raise ValueError(f"Model.from_config: the config's numbers cannot be computed with: {error}") from error


def _read_config(config: Mapping[str, Any]) -> Config:
    check_types(config)
    spec = ModelSpec.from_hf_config(config)  # refuses other model types
    if (read_model := _MODELS.get(spec.name)) is None:
        raise ValueError(f"Model.from_config: model_type {spec.name!r} is no whole model here, only layers.v41_layer")
    reader = _Reader(_of_text(config))
    reader.only("hidden_act", "silu")
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("expert_dtype", None, "fp4", "fp8", "bf16")
    _check_quantization(config.get("quantization_config") or {})
    return read_model(reader, spec)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config, with what counts for it of the whole."""
    part = text_config(config)
    whole = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id") if config.get(name) is not None}
    return {**part, **whole}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads a mapping; what is missing or unknown raises a ValueError that names it."""

    config: Mapping[str, Any]

    def __call__(self, *names: str, default: Any = None) -> Any:
        """The value of the first name that is there and not None; without a default it must be there."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is None:
            raise ValueError(f"Model.from_config: the config has no {' or '.join(names)}")
        return default

    def only(self, name: str, *accepted: Any) -> None:
        """Refuses another value than these; the first of them stands for a missing one."""
        value = self.config.get(name)
        if value is not None and value not in accepted:
            raise ValueError(f"Model.from_config: {name} must be {_listed(accepted)}, got {value!r}")

    def per_layer(self, name: str, accepted: Collection[Any], default: Callable[[int], Any]) -> tuple[Any, ...]:
        """A value for each layer."""
        layers = self("num_hidden_layers")
        values = self.config.get(name)
        values = [default(i) for i in range(layers)] if values is None else list(values)[:layers]
        if len(values) < layers:
            raise ValueError(f"Model.from_config: {name} must name {layers} layers, got {len(values)}")
        if unknown := [value for value in values if value not in accepted]:
            raise ValueError(f"Model.from_config: {name} must be of {_listed(accepted)}, got {unknown[0]!r}")
        return tuple(values)


def _listed(values: Collection[Any]) -> str:
    return " or ".join(map(repr, values))


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Refuses weights that are not FP8 in blocks; experts may be FP4 beside them."""
    method, block = config.get("quant_method", "fp8"), config.get("weight_block_size", WEIGHT_BLOCK)
    if method != "fp8":
        raise ValueError(f"Model.from_config: quantization_config.quant_method must be 'fp8', got {method!r}")
    if not isinstance(block, (list, tuple)) or tuple(block) != WEIGHT_BLOCK:
        raise ValueError(
            f"Model.from_config: quantization_config.weight_block_size must be {list(WEIGHT_BLOCK)}, got {block!r}"
        )
    _Reader(config).only("expert_dtype", None, "fp4", "fp8", "bf16")


def _rope(parameters: Mapping[str, Any], dim: int, theta: float, *, magnitude: float | None = None) -> Rope:
    """The rope of `rope_parameters`; YaRN's magnitude is computed unless it is given or stands in the parameters."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or theta)
    if not theta > 1:
        raise ValueError(f"Model.from_config: rope_theta must be above 1, got {theta}")
    if kind == "default":
        return Rope(dim=dim, theta=theta)
    if kind != "yarn":
        raise ValueError(f"Model.from_config: rope_type must be 'default' or 'yarn', got {kind!r}")
    for name in ("factor", "original_max_position_embeddings"):
        if parameters.get(name) is None:
            raise ValueError(f"Model.from_config: the yarn rope parameters have no {name}")
    if parameters.get("truncate") is False:
        raise ValueError("Model.from_config: truncate must be True in the yarn rope parameters, got False")
    factor = float(parameters["factor"])
    if not factor > 0:
        raise ValueError(f"Model.from_config: factor must be above 0 in the yarn rope parameters, got {factor}")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if parameters.get("attention_factor") is not None:
        magnitude = float(parameters["attention_factor"])
    elif magnitude is None and mscale and mscale_all_dim:
        magnitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    elif magnitude is None:
        magnitude = yarn_mscale(factor, 1.0)
    rope = Rope(
        dim=dim,
        theta=theta,
        factor=factor,
        original_len=parameters["original_max_position_embeddings"],
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        magnitude=magnitude,
    )
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        rope.inv_freq()
    return rope


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """The tokens of an `eos_token_id`, which is a number or a list."""
    tokens = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(map(is_int, tokens)):
        raise ValueError(f"Model.from_config: eos_token_id must be an integer or a list of them, got {tokens!r}")
    return tokens


def _swiglu_limit(read: _Reader) -> float | None:
    """The bound of the SwiGLU's inputs; 0 and below stand for none, as in the released code."""
    limit = float(read("swiglu_limit", default=10.0))
    return limit if limit > 0 else None


def _config_of(
    kind: Callable[..., _C], read: _Reader, spec: ModelSpec, *, norm_eps: float, ratios: tuple[int, ...]
) -> Callable[..., _C]:
    """The constructor of a config of this kind, with the fields that all models read alike."""
    return functools.partial(
        kind,
        spec=spec,
        vocab_size=read("vocab_size"),
        hidden_size=read("hidden_size"),
        num_layers=read("num_hidden_layers"),
        q_rank=read("q_lora_rank"),
        norm_eps=float(read("rms_norm_eps", default=norm_eps)),
        tied=bool(read("tie_word_embeddings", default=False)),
        eos_token_ids=eos_token_ids(read("eos_token_id", default=())),
        ratios=ratios,
    )


def _latent_config_of(
    kind: Callable[..., _C], read: _Reader, spec: ModelSpec, *, norm_eps: float, nope_dim: int, v_dim: int
) -> Callable[..., _C]:
    """As `_config_of`, with the fields of `LatentConfig`."""
    read.only("moe_layer_freq", 1)
    num_dense = read("first_k_dense_replace", default=3)
    mlps = read.per_layer("mlp_layer_types", LATENT_MLPS, lambda i: LATENT_MLPS[i >= num_dense])
    return functools.partial(
        _config_of(kind, read, spec, norm_eps=norm_eps, ratios=(0,) * len(mlps)),
        dense=tuple(mlp == "dense" for mlp in mlps),
        dense_width=read("intermediate_size"),
        nope_dim=read("qk_nope_head_dim", default=nope_dim),
        v_dim=read("v_head_dim", default=v_dim),
    )


def _v4(read: _Reader, spec: ModelSpec) -> V4Config:
    read.only("scoring_func", *SCORES)
    read.only("norm_topk_prob", True)
    read.only("n_shared_experts", 1)
    layers, ratios = read("num_hidden_layers"), tuple(layer.ratio for layer in spec.layers)
    if len(ratios) < layers or set(ratios) - set(V4_RATIOS):
        raise ValueError(
            f"Model.from_config: compress_ratios or layer_types must give {layers} ratios of {_listed(V4_RATIOS)}, "
            f"got {list(ratios)}"
        )
    hash_layers = read("num_hash_layers", default=3)
    mlps = read.per_layer("mlp_layer_types", V4_MLPS, lambda i: V4_MLPS[i >= hash_layers])
    parameters = rope_parameters(read.config)
    if parts := [name for name in ("main", "compress") if parameters.get(name) is not None]:
        if len(parts) < 2:
            raise ValueError(f"Model.from_config: rope_parameters must have main and compress, got {parts[0]} alone")
        main, compress = parameters["main"], parameters["compress"]
    else:  # the released form: one set, which layers without compression do not follow
        main, compress = {}, {**parameters, "rope_theta": None}
    window_rope = _rope(main, spec.rope_dim, read("rope_theta", default=10000.0))
    # The released models rotate without YaRN's magnitude.
    compress_rope = _rope(compress, spec.rope_dim, read("compress_rope_theta", default=160000.0), magnitude=1.0)
    for rope in (window_rope, compress_rope):
        if rope.magnitude != 1:
            raise ValueError(f"Model.from_config: rope_parameters must have attention_factor 1, got {rope.magnitude}")
    spec = dataclasses.replace(spec, compress_ratios=tuple(sorted(set(ratios))))  # without the draft layer's
    if spec.num_heads % (o_groups := read("o_groups")):
        raise ValueError(f"Model.from_config: o_groups must divide {spec.num_heads} heads, got {o_groups}")
    return _config_of(V4Config, read, spec, norm_eps=1e-6, ratios=ratios)(
        hashed=tuple(mlp == "hash_moe" for mlp in mlps),
        o_groups=o_groups,
        o_rank=read("o_lora_rank"),
        streams=_streams(read, has_head=True),
        window_rope=window_rope,
        compress_rope=compress_rope,
        block_drafter=_block_drafter(read, layers),
        moe=MoE(
            num_experts=read("n_routed_experts", "num_local_experts"),
            top_k=read("num_experts_per_tok"),
            width=read("moe_intermediate_size"),
            shared_width=read("moe_intermediate_size"),
            score=read("scoring_func", default="sqrtsoftplus"),
            scale=float(read("routed_scaling_factor", default=1.5)),
            limit=_swiglu_limit(read),
            float32_router=False,
        ),
    )


def _block_drafter(read: _Reader, layers: int) -> BlockDrafter | None:
    """What the config says of a DSpark drafter; None: nothing, or a block of 0 tokens."""
    if not (block := read.config.get("dspark_block_size")):
        return None
    targets, noise = tuple(read("dspark_target_layer_ids")), read("dspark_noise_token_id")
    if not targets or list(targets) != sorted(set(targets) & set(range(layers))):
        raise ValueError(
            f"Model.from_config: dspark_target_layer_ids must be of the {layers} layers, in order, got {list(targets)}"
        )
    if noise >= (vocabulary := read("vocab_size")):
        raise ValueError(f"Model.from_config: dspark_noise_token_id must be below {vocabulary}, got {noise}")
    return BlockDrafter(targets=targets, block=block, noise=noise, markov_rank=read("dspark_markov_rank"))


def _experts_in_groups(read: _Reader, *, groups: int, top_groups: int, limit: float | None = None) -> MoE:
    """The experts of V3.2 and GLM; groups and top_groups are for missing keys."""
    read.only("scoring_func", "sigmoid")
    read.only("topk_method", "noaux_tc")
    experts, groups = read("n_routed_experts", "num_local_experts"), read("n_group", default=groups)
    if groups < 1 or experts % groups:
        raise ValueError(f"Model.from_config: n_group must divide n_routed_experts, got {groups} and {experts}")
    width = read("moe_intermediate_size")
    return MoE(
        num_experts=experts,
        top_k=read("num_experts_per_tok"),
        width=width,
        shared_width=width * read("n_shared_experts", default=1),
        score="sigmoid",
        scale=float(read("routed_scaling_factor", default=2.5)),
        normalised=bool(read.config.get("norm_topk_prob", True)),
        groups=groups,
        top_groups=read("topk_group", default=min(top_groups, groups)),
        limit=limit,
    )


def _glm53(read: _Reader, spec: ModelSpec) -> Glm53Config:
    kinds = read.per_layer("layer_types", GLM53_LAYERS, lambda i: list(GLM53_LAYERS)[i % 4 == 3])
    linear = tuple(GLM53_LAYERS[kind] for kind in kinds)
    if all(linear):
        raise ValueError("Model.from_config: layer_types must have an indexed_attention layer")
    indexed_layers(read.config)  # refuses layers that share an indexer's entries
    return _latent_config_of(Glm53Config, read, spec, norm_eps=1e-5, nope_dim=256, v_dim=256)(
        linear=linear,
        kda=_kda(read),
        streams=_streams(read),
        moe=_experts_in_groups(read, groups=1, top_groups=1, limit=_swiglu_limit(read)),
    )


def _kda(read: _Reader) -> KDA:
    """transformers' four keys, or the released `linear_attn_config`, which goes before them."""
    released = _Reader(read("linear_attn_config", default={}))
    bound = released.config.get("gate_lower_bound", read.config.get("linear_lower_bound", -5.0))
    if bound is None and released.config and released.config.get("safe_gate", True):
        bound = -5.0
    return KDA(
        heads=released("num_heads", default=read("linear_num_heads", default=64)),
        head_dim=released("head_dim", default=read("linear_head_dim", default=128)),
        kernel=released("short_conv_kernel_size", default=read("linear_conv_kernel_dim", default=4)),
        lower_bound=None if bound is None else float(bound),
    )


def _streams(read: _Reader, *, has_head: bool = False) -> HyperConnections:
    return HyperConnections(
        has_head=has_head,
        streams=read("hc_mult", default=4),
        iterations=read("hc_sinkhorn_iters", default=20),
        eps=float(read("hc_eps", default=1e-6)),
    )


def _v32(read: _Reader, spec: ModelSpec) -> V32Config:
    is_glm = spec.name == "glm_moe_dsa"
    read.only("rope_interleave", True)
    read.only("indexer_rope_interleave", is_glm)
    # The defaults of transformers' config classes.
    nope_dim, v_dim, norm_eps = (192, 256, 1e-5) if is_glm else (128, 128, 1e-6)
    groups, top_groups = (1, 1) if is_glm else (8, 4)
    parameters = rope_parameters(read.config)
    return _latent_config_of(V32Config, read, spec, norm_eps=norm_eps, nope_dim=nope_dim, v_dim=v_dim)(
        rope=_rope(parameters, spec.rope_dim, read("rope_theta", default=10000.0)),
        index_interleaved=is_glm,
        indexed=indexed_layers(read.config),
        moe=_experts_in_groups(read, groups=groups, top_groups=top_groups),
    )


# By the name of the spec.
_MODELS = {"deepseek_v4": _v4, "deepseek_v32": _v32, "glm_moe_dsa": _v32, "glm5_next": _glm53}
