"""The ways into XLA and torch: how a kernel is described, compiled, kept, launched and dispatched to."""
