"""Prefill with at most 32 heads (d 576: 16), where heads are the columns of a wgmma and not its rows."""
