"""The ways from an XLA program into a kernel: Triton, TVM FFI, torch operators."""
