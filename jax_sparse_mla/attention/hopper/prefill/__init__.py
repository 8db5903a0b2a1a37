"""Hopper kernels in Pallas Mosaic GPU: JAX compiles them itself, so a program that uses them needs no torch."""
