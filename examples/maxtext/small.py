"""Small MaxText models with random weights, and what it takes to run one: the tests and the benchmark share them."""

import contextlib
import os

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText without Google's cloud packages
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.layers.attention_compressed import CompressedAttention
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils

_COMMON = {
    "run_name": "small", "override_model_config": True, "enable_checkpointing": False, "log_config": False,
    "skip_jax_distributed_system": True, "hardware": "cpu", "attention": "dot_product", "megablox": False,
    "sparse_matmul": False, "scan_layers": False, "per_device_batch_size": 1, "vocab_size": 512,
    "matmul_precision": "highest", "dtype": "float32", "weight_dtype": "float32", "max_prefill_predict_length": 128,
    "remat_policy": "none",
}  # fmt: skip
# The attention's dimensions are the models' own but for the heads and what is selected; the rest is small.
MODELS = {
    "v4": {
        "model_name": "deepseek4-tiny", "base_num_decoder_layers": 5, "compress_ratios": [0, 0, 4, 128, 4],
        "head_dim": 512, "qk_rope_head_dim": 64, "indexer_head_dim": 128, "sliding_window_size": 128,
        "indexer_topk": 32,
    },
    "v32": {
        "model_name": "deepseek3.2-671b", "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 4,
        "base_mlp_dim": 64, "base_moe_mlp_dim": 64, "base_num_decoder_layers": 4, "first_num_dense_layers": 1,
        "num_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 32, "indexer_n_heads": 4, "indexer_topk": 48,
        "use_mla_absorbed_mqa": True, "mla_naive_kvcache": False,
    },
}  # fmt: skip


def config(model: str, **options):
    """MaxText's config of `MODELS[model]`; options are MaxText's own."""
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(["small", base], **{**_COMMON, **MODELS[model], **options})


def build(cfg, seed: int = 0):
    """The model with random weights, and its mesh; random are also sinks and position biases, which MaxText zeroes."""
    mesh = maxtext_utils.get_mesh_from_config(cfg)
    model = model_creation_utils.from_config(cfg, mesh=mesh, rngs=nnx.Rngs(params=seed, dropout=1))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 1000))
    for _, module in nnx.iter_graph(model):
        names = ["sinks"] if isinstance(module, CompressedAttention) else ["position_bias"]
        for name in names:
            parameter = getattr(module, name, None)
            if isinstance(parameter, nnx.Param):
                value = parameter.get_value()
                parameter.set_value(jax.random.normal(next(keys), value.shape, value.dtype))
    return model, mesh


@contextlib.contextmanager
def running(cfg, mesh):
    """Where MaxText's functions are traced."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(cfg.logical_axis_rules):
        yield


def tokens(cfg, length: int, documents: int = 1, seed: int = 0) -> dict[str, jax.Array]:
    """Random tokens `[batch, length]` as MaxText's trainer takes them, so many documents packed into a sequence."""
    shape = cfg.global_batch_size_to_train_on, length
    words = jax.random.randint(jax.random.key(seed), (shape[0], length + 1), 0, cfg.vocab_size)
    first = jnp.asarray([length * i // documents for i in range(documents)])  # not on a compressed entry's border
    column = jnp.arange(length)
    document = jnp.searchsorted(first, column, side="right")
    parts = {"position": jnp.broadcast_to(column - first[document - 1], shape).astype(jnp.int32)}
    parts["segmentation"] = jnp.broadcast_to(document, shape).astype(jnp.int32)
    given = {"inputs": words[:, :-1], "targets": words[:, 1:]}
    return given | {f"{name}_{part}": value for name in ("inputs", "targets") for part, value in parts.items()}


def forward(model):
    """`logits(weights, data)`, float32 `[batch, length, vocabulary]`, and the model's weights."""
    graph, weights = nnx.split(model)

    def logits(weights, data):
        given = (data[name] for name in ("inputs", "inputs_position", "inputs_segmentation"))
        return nnx.merge(graph, weights)(*given, enable_dropout=False).astype(jnp.float32)

    return logits, weights


def compare(dense, weights, requests, length):
    """What was made for each request beside dense attention's logits at the same places.

    Args:
      dense, weights: `forward` of the model.
      requests: the engine's, after it served them.
      length: of the padded sequences, so that dense attention compiles once.

    Returns:
      How many tokens have dense attention's largest logit, how many there are, by how much the logit of one falls short
      of the largest at most, and by how much the mean logit does.
    """
    same = count = 0
    short, spread = 0.0, []
    for request in requests:
        words = np.zeros((1, length), np.int32)
        read = len(request.prompt)
        words[0, : read + len(request.output)] = request.prompt + request.output
        data = {"inputs": words, "inputs_position": np.arange(length)[None], "inputs_segmentation": np.ones_like(words)}
        scores = np.asarray(dense(weights, data))[0, read - 1 : read - 1 + len(request.output)]
        made = np.take_along_axis(scores, np.asarray(request.output)[:, None], 1)[:, 0]
        same, count = same + int(np.sum(made == scores.max(1))), count + len(made)
        short, spread = max(short, float(np.max(scores.max(1) - made))), [*spread, *(scores.max(1) - scores.mean(1))]
    return same, count, short, float(np.mean(spread))


def gradients(cfg, model):
    """MaxText's own training loss and its gradients, `(loss, gradients) = step(weights, data)`, and the weights."""
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def loss(weights, data):
        return train.loss_fn(nnx.merge(graph, weights, rest, copy=True), cfg, dict(data), None, None)[0]

    return jax.value_and_grad(loss), weights


def named(gradients) -> dict[str, np.ndarray]:
    """float64 arrays by their parameter's name."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The norm of all differences over the norm of all of theirs."""
    squares = [[np.sum(np.square(x)) for x in (ours[name] - theirs[name], theirs[name])] for name in theirs]
    wrong, all_of_it = np.sum(squares, 0)
    return float(np.sqrt(wrong / all_of_it))
