"""Attention on torch tensors: which kernel serves a call, and the call of each."""
