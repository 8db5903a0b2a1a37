"""Kernels of jax_sparse_mla launched by torch, on its current stream, with no JAX array in sight."""
