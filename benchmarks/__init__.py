"""Benchmarks of a checkout: `python -m benchmarks` lists them."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / "interop"), str(_ROOT / "tests" / "support")]
