"""A decode step of DeepSeek-V4's attention from torch: captured in a CUDA graph once, replayed for every token.

The layers' weights are random and small; caches, tables and kernels are those of V4-Flash. An engine puts the tensors
of its own pools into the same dataclasses. What a replay reads (lengths, tables, hidden states) lies in tensors that
stay where they are; what it makes on the way is the graph's.

It needs an NVIDIA GPU. The tests also run three small layers of it without one, uncaptured, in Triton's interpreter.
"""

import dataclasses

import torch
from sparse_mla_torch import layers

import jax_sparse_mla as mla
from jax_sparse_mla.layers import CompressorParams, IndexRows, V4LayerParams, V4Rows

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SPEC = mla.DEEPSEEK_V4_FLASH
if not ON_GPU:
    SPEC = dataclasses.replace(SPEC, num_heads=2, index_heads=2, index_topk=64)
RATIOS = (0, 0, *(4, 128) * 20, 4) if ON_GPU else (0, 4, 128)
BATCH, PAGES, HIDDEN = 8 if ON_GPU else 2, 4, 256  # requests, pages of 256 tokens for each, values of a hidden state
INV_FREQ = 10000.0 ** -(torch.arange(32, device=DEVICE) / 32)


class Layer(torch.nn.Module):
    """A layer's projections, and what the library takes of it: parameters, and the view of its caches."""

    def __init__(self, ratio, cache):
        super().__init__()
        self.ratio, self.cache, spec = ratio, cache, SPEC
        wide, index = (2 if ratio == 4 else 1), (spec.index_heads * spec.index_dim, spec.index_heads)
        self.sizes = [spec.num_heads * spec.qk_dim, spec.qk_dim]  # q, kv
        if ratio:
            self.sizes += [wide * spec.qk_dim] * 2  # the compressor's kv and score
        if ratio == 4:
            self.sizes += [*index, *[wide * spec.index_dim] * 2]  # the indexer's q, weights, kv and score
        self.project = torch.nn.Linear(HIDDEN, sum(self.sizes), bias=False, dtype=torch.bfloat16, device=DEVICE)
        self.output = torch.nn.Linear(self.sizes[0], HIDDEN, bias=False, dtype=torch.bfloat16, device=DEVICE)

        def compressor(dim):
            ape = torch.zeros(ratio, wide * dim, device=DEVICE)
            return CompressorParams(ape=ape, norm_weight=torch.ones(dim, device=DEVICE), inv_freq=INV_FREQ)

        self.params = V4LayerParams(
            attn_sink=torch.zeros(spec.num_heads, device=DEVICE),
            compressor=compressor(spec.qk_dim) if ratio else None,
            index_compressor=compressor(spec.index_dim) if ratio == 4 else None,
        )

    def forward(self, hidden, batch, metadata):
        positions, parts = metadata.positions, [x.contiguous() for x in self.project(hidden).split(self.sizes, dim=1)]
        q, kv = (
            rope(parts[0].view(-1, SPEC.num_heads, SPEC.qk_dim), positions),
            rope(parts[1][:, None], positions)[:, 0],
        )
        rows = V4Rows(q=q, kv=kv)
        if self.ratio:
            rows = dataclasses.replace(rows, compressed_kv=parts[2], compressed_score=parts[3])
        if self.ratio == 4:
            q = rope(parts[4].view(-1, SPEC.index_heads, SPEC.index_dim), positions)
            weights = parts[5].float() * (SPEC.index_heads * SPEC.index_dim) ** -0.5
            rows = dataclasses.replace(rows, index=IndexRows(q=q, weights=weights, kv=parts[6], score=parts[7]))
        out = layers.v4_layer(self.cache, rows, self.params, batch, metadata, spec=SPEC, ratio=self.ratio)
        return hidden + self.output(rope(out, positions, inverse=True).flatten(1))


def rope(x, positions, inverse=False):
    """Rotates the pairs (2i, 2i + 1) of the last 64 values: of queries, keys and index queries, and of outputs back."""
    angle = positions[:, None, None] * (-INV_FREQ if inverse else INV_FREQ)
    pairs = torch.view_as_complex(x[..., -64:].float().unflatten(-1, (32, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([x[..., :-64], turned.to(x.dtype)], dim=-1)


@torch.no_grad()
def main(num_tokens: int = 8) -> torch.Tensor:
    # The caches of all layers of a ratio in a few tensors. Page 0 takes what padding rows write.
    sizes = {"num_pages": 1 + BATCH * PAGES, "num_swa_pages": 1 + BATCH * PAGES, "max_requests": BATCH}
    pools = {r: layers.v4_layer_cache(SPEC, r, **sizes, num_layers=RATIOS.count(r), device=DEVICE) for r in set(RATIOS)}
    model = [Layer(ratio, pools[ratio].layer(RATIOS[:i].count(ratio))) for i, ratio in enumerate(RATIOS)]

    num_slots = (1 + BATCH * PAGES) * SPEC.page_size
    slots = torch.arange(num_slots, dtype=torch.int32, device=DEVICE)
    full_to_swa = torch.cat([slots, slots.new_tensor([-1])])  # window slots are the pool's own here
    tables = mla.RequestTables(req_to_token=slots[SPEC.page_size :].view(BATCH, -1), full_to_swa=full_to_swa)
    requests = torch.arange(BATCH, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(BATCH, dtype=torch.int32, device=DEVICE)  # tokens of each request; 0 before the first step
    hidden = torch.randn(BATCH, HIDDEN, device=DEVICE).bfloat16()

    def step():
        out_cache_loc = tables.req_to_token[requests, seq_lens]
        seq_lens.add_(1)
        batch = mla.ForwardBatch(
            mode=mla.ForwardMode.DECODE, max_seq_len=tables.req_to_token.shape[1], req_pool_indices=requests,
            seq_lens=seq_lens, out_cache_loc=out_cache_loc,
        )  # fmt: skip
        metadata = layers.prepare_v4_step(SPEC, batch, tables).metadata  # once, for all layers
        x = hidden
        for layer in model:
            x = layer(x, batch, metadata)
        hidden.copy_(torch.nn.functional.rms_norm(x, x.shape[1:]))

    step()  # the first token; compiles
    replay = step
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # captures, and runs nothing
            step()
        replay = graph.replay
    for _ in range(num_tokens - 1):
        replay()
    print(
        "layers:", len(model), "| tokens:", seq_lens.tolist(), "| captured:", ON_GPU, "| hidden:", tuple(hidden.shape)
    )
    return hidden


if __name__ == "__main__":
    if not ON_GPU:
        raise SystemExit("examples/torch_step.py needs an NVIDIA GPU that torch can use: it captures a CUDA graph")
    main()
