"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _at_least(0, int(text))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def mesh_shape(text: str) -> tuple[int, int]:
    """An argparse type: two numbers with an x between them."""
    shares, x, devices = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"must be SHARESxDEVICES, for instance 2x1, got {text!r}")
    return positive_int(shares), positive_int(devices)


def probability(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 … 1, got {value}")
    return value
