"""Prefill with at most 32 heads, where heads are the columns of a wgmma and not its rows."""
