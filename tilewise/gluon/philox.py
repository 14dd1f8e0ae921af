"""``tilewise.philox`` in kernels: the same bits from the same counters."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise import philox as definition

ROUNDS = gl.constexpr(definition.ROUNDS)
MULTIPLIERS = gl.constexpr(definition.MULTIPLIERS)
WEYL = gl.constexpr(definition.WEYL)


@gluon.jit
def load_key(pointer):
    """The key of a call, as two words."""
    key = gl.load(pointer)
    return key.to(gl.uint32), (key >> 32).to(gl.uint32)


@gluon.jit
def words(key, group, query, head, batch):
    """Four words of every counter (group, query, head, batch). group and query: tiles that broadcast
    against each other."""
    k0, k1 = key
    zeros = group * 0 + query * 0
    c0, c1 = (zeros + group).to(gl.uint32), (zeros + query).to(gl.uint32)
    c2, c3 = (zeros + head).to(gl.uint32), (zeros + batch).to(gl.uint32)
    for _ in gl.static_range(ROUNDS):
        a = c0.to(gl.uint64) * MULTIPLIERS[0]
        b = c2.to(gl.uint64) * MULTIPLIERS[1]
        c0 = (b >> 32).to(gl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(gl.uint32) ^ c3 ^ k1
        c1 = b.to(gl.uint32)
        c3 = a.to(gl.uint32)
        k0 += WEYL[0]
        k1 += WEYL[1]
    return c0, c1, c2, c3


@gluon.jit
def bits_of(word, half):
    """The 16 bits of a word that a key takes. half: 0 or 1."""
    return ((word >> (16 * half).to(gl.uint32)) & 0xFFFF).to(gl.int32)
