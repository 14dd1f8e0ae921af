"""Philox4x32-10 in uint32 arithmetic: one counter per element."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def philox_kernel(out_ptr, key_lo, key_hi, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    c0 = index.to(gl.uint32)
    c1 = gl.full([BLOCK], 1, gl.uint32, layout)
    c2 = gl.full([BLOCK], 2, gl.uint32, layout)
    c3 = gl.full([BLOCK], 3, gl.uint32, layout)
    k0 = key_lo.to(gl.uint32)
    k1 = key_hi.to(gl.uint32)
    for _ in gl.static_range(10):
        a = gl.full([BLOCK], 0xD2511F53, gl.uint32, layout)
        b = gl.full([BLOCK], 0xCD9E8D57, gl.uint32, layout)
        hi0 = gl.umulhi(a, c0)
        hi1 = gl.umulhi(b, c2)
        lo0 = a * c0
        lo1 = b * c2
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    gl.store(out_ptr + index, c0.to(gl.int32, bitcast=True))
    gl.store(out_ptr + gl.num_programs(0) * BLOCK + index, c3.to(gl.int32, bitcast=True))


def philox(n, key, BLOCK=128):
    """Words 0 and 3 for the counters (i, 1, 2, 3), i < n: int32 [2, n]. key: 64 bits."""
    out = torch.empty(2, n, dtype=torch.int32)
    low, high = (k - (1 << 32) if k >= 1 << 31 else k for k in (key & 0xFFFFFFFF, key >> 32))
    philox_kernel[(n // BLOCK,)](out, low, high, BLOCK)
    return out
