"""Strides in units of several elements: of their alignment that is all that a kernel is compiled for."""

from __future__ import annotations

import math

from tilewise.backends.triton.launch import Strides


def unit_of(*steps: int) -> int:
    """The most elements, up to the 8 of one access, of which all strides are multiples. Kernels that are
    launched again are compiled for that, not for the strides."""
    return math.gcd(8, *steps)


def in_units(steps: Strides, unit: int) -> list[int]:
    """Strides in units of so many elements."""
    return [step // unit for step in steps]
