"""Barriers that nothing uses, found in a Gluon kernel's TTGIR.

Triton gives the memory of a buffer that is not used any more to another one. Of a barrier that is only
initialised the hardware may write the state back much later, over what the other buffer then holds:
that showed on an H200 as eight bytes of a barrier in an output, once in thousands of tiles. (PTX says
so: memory of an mbarrier object may be used for nothing else until it is invalidated.)
"""

from __future__ import annotations

import re

_BARRIERS = re.compile(r"(%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)*1xi64\b")


def idle(ttgir: str) -> list[str]:
    """Names of barriers in memory of their own that no partition uses."""
    setup, found, partitions = ttgir.partition("ttg.warp_specialize(")
    if not found:
        return []
    # What the first partition uses it names in its body, the others are given.
    used = set(re.findall(r"%[\w#]+", partitions.partition(" partition0(")[0]))
    return [name for name in _BARRIERS.findall(setup) if name not in used]
