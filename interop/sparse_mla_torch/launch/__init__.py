"""Launches of Triton kernels on torch tensors."""
