"""The plugins that make vLLM and SGLang choose our kernels (docs/guides/engines.md): an entry point for each engine.

`calls` decides, for each call of an engine, whether ours or the engine's own function serves it. `vllm` and `sglang`
know where the engines call FlashMLA. Importing an entry point's module imports neither its engine nor torch nor JAX.
"""
