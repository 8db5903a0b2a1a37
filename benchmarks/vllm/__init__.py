"""vLLM's attention layers with FlashMLA and with ours: `benchmarks.engines_vllm` on a GPU, `tests/engines` on a CPU."""
