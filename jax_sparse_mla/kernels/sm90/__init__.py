"""Kernels for SM90 alone: the plan of the CUDA decode kernels and the Pallas Mosaic GPU prefill."""
