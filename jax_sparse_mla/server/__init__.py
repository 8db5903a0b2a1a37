"""A server of OpenAI's protocol around the engine of `jax_sparse_mla.serving`; it needs the extra `serve`."""
