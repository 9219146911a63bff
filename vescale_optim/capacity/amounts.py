"""Bytes and FLOPs as text."""

from __future__ import annotations


def format_bytes(value: float) -> str:
    """3.40 GB, 12.5 MB, 1,342 TB: three digits or more, decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:,.0f} B"


def format_flops(value: float) -> str:
    """5.20 TFLOP, 1,342 PFLOP."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value / 1e6)} MFLOP"


def _three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
