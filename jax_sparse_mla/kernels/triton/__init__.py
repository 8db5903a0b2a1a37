"""Triton kernels: one source each, launched by jax-triton inside XLA programs and by torch on its own stream."""
