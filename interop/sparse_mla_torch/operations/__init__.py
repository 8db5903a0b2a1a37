"""The operations on torch tensors, by the kernels of `jax_sparse_mla`."""
