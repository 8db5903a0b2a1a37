"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def natural(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def positive_ints(text: str) -> list[int]:
    """An argparse type: numbers between commas."""
    return [positive_int(part) for part in text.split(",")]


def mesh_shape(text: str) -> tuple[int, int]:
    """An argparse type: two numbers with an x between them."""
    shares, x, devices = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"must be SHARESxDEVICES, for instance 2x1, got {text!r}")
    return positive_int(shares), positive_int(devices)


def probability(text: str) -> float:
    """An argparse type."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 … 1, got {value}")
    return value
