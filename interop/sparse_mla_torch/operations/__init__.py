"""The operations of `jax_sparse_mla` on torch tensors, by the same kernels, on torch's current stream.

A function here is the one of its name in `jax_sparse_mla`, and its docstring says only what differs. All of them:

  * take contiguous tensors of one device, which is the current one;
  * write into `out=` where it is given, and allocate it where it is not;
  * neither synchronise nor copy to the host, so a CUDA graph captures them;
  * raise TypeError for a tensor of another dtype, and ValueError for one of another shape, not contiguous or on another
    device.
"""
