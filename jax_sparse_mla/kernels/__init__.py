"""Kernels and how they are launched: Triton for any GPU, CUDA and Pallas Mosaic for SM90."""
