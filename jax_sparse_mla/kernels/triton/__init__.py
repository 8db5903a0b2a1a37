"""Triton kernels: one source each, launched inside XLA programs, and by torch on its own stream."""
