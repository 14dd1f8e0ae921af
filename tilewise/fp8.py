"""FP8 as attention uses it: e4m3 with a scale for each tile, and a rotation that spreads outliers.

What a backend quantises it quantises as this module does (Shah et al., FlashAttention-3, section 3.3):

- *Scale.* That of a tile is its largest absolute value / 448, which then becomes e4m3's largest
  number; 1 for a tile of zeros. By division, which every backend can round alike. Rows that no
  sequence uses, keys that no query may see and queries that see no key have no part in it: their codes
  are 0, whatever they hold.
- *Tiles* are counted from the start of a sequence and never reach into the next one.
- *Rounding* is to the nearest, ties to even. What is not finite becomes NaN and has no part in the
  scale: it spoils the rows that see it, not those that share its tile.
- *Rotation.* Queries and keys times diag(signs) H / sqrt(D), H the Hadamard matrix, an orthogonal one:
  their products stay, but each component is now a sum of all, and no outlier stands alone. Signs are
  drawn for each key head; head dims that are no power of two are padded with zeros to the next one.
- *Weights* are at most 1 before the division by their sum, for the maximum of the row is known. They
  are scaled by 256, not by the 448 that would fit: it is a power of two, so it goes into the exponent
  of exp2 for nothing and rounds no weight. What it costs is less than one of 18 binary orders: below
  2**-18 of the largest a weight becomes 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.philox import philox

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
TILE_Q = 128
TILE_K = 128  # of values, too
WEIGHT_SCALE = 256.0
# The key of the rotation's signs, the same in every backend: a nothing-up-my-sleeve number, "TILEWISE".
ROTATION_KEY = 0x54494C4557495345


class Quantized(NamedTuple):
    """Numbers as e4m3 codes and one scale for each tile of rows. ``tile`` None: one tile of all rows,
    which the whole group shares."""

    codes: Tensor  # (H, S, G, W), e4m3
    descale: Tensor  # (H, tiles, G or 1, 1), fp32: what a code is multiplied with
    tile: int | None

    def dequantized(self) -> Tensor:
        """(H, S, G, W), fp32."""
        descale = self.descale
        if self.tile is not None:
            descale = descale.repeat_interleave(self.tile, dim=1)[:, : self.codes.shape[1]]
        return self.codes.to(torch.float32) * descale


def quantize(x: Tensor, used: range, tile: int | None = None) -> Quantized:
    """One sequence's queries, keys or values in e4m3.

    x: (H, S, G, W), G the query heads of key head H, or 1. used: the rows that have an effect.
    """
    heads, rows, group, _ = x.shape
    step = max(rows, 1) if tile is None else tile
    shared = (1, 2, 3) if tile is None else (1, 3)
    codes = torch.zeros(x.shape, dtype=E4M3, device=x.device)
    shape = (heads, -(-rows // step), 1 if tile is None else group, 1)
    descale = torch.ones(shape, dtype=torch.float32, device=x.device)
    for n in range(shape[1]):
        inside = slice(max(n * step, used.start), min((n + 1) * step, used.stop))
        if inside.start < inside.stop:
            values = x[:, inside].to(torch.float32)
            values = values.masked_fill(~values.isfinite(), math.nan)
            scale = scale_of(values.nan_to_num(0).abs().amax(shared, keepdim=True))
            codes[:, inside] = encode(values / scale)
            descale[:, n] = scale.squeeze(1)
    return Quantized(codes, descale, tile)


def scale_of(largest: Tensor) -> Tensor:
    """The scale of a tile by its largest absolute value, fp32."""
    # A GPU may take subnormal numbers for 0, and nothing can be divided by that.
    scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return scale.masked_fill(largest == 0, 1)


def encode(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers, ties to even; beyond the largest one, that. NaN stays."""
    # Saturating here, since what conversion itself does out of range depends on PyTorch's version.
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def round_weights_(p: Tensor) -> Tensor:
    """Weights between 0 and 1, in place, as they are after e4m3."""
    p.mul_(WEIGHT_SCALE)
    return p.copy_(encode(p)).div_(WEIGHT_SCALE)


def rotate(x: Tensor, heads: range) -> Tensor:
    """Queries or keys of the key heads ``heads``, (H, ..., D), rotated: fp32, D padded as ``padded``.

    The fast transform: log2(D) rounds of sums and differences of components 1, 2, 4, ... apart.
    """
    dim = x.shape[-1]
    width = padded(dim)
    sign = signs(heads, width, x.device).view(-1, *[1] * (x.dim() - 2), width)
    x = torch.nn.functional.pad(x.to(torch.float32), (0, width - dim)) * sign
    step = 1
    while step < width:
        a, b = x.unflatten(-1, (width // (2 * step), 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x * width**-0.5


def padded(dim: int) -> int:
    """The power of two that a head dim is padded to."""
    return 1 << (dim - 1).bit_length()


def signs(heads: range, width: int, device: torch.device | str = "cpu") -> Tensor:
    """The rotation's signs, 1 or -1: (len(heads), width), fp32.

    Component c of key head h: bit c % 32 of word (c // 32) % 4 of the counter (c // 128, h, 0, 0).
    """
    head = torch.arange(heads.start, heads.stop, device=device)[:, None]
    block = torch.arange(-(-width // 128), device=device)[None, :]
    zero = torch.zeros_like(block)
    key = torch.full((1, 1), ROTATION_KEY, dtype=torch.int64, device=device)
    words = torch.stack(philox((block, head, zero, zero), key), dim=-1)  # (H, blocks, 4)
    bits = words[..., None] >> torch.arange(32, device=device) & 1
    return 1 - 2 * bits.flatten(1)[:, :width].to(torch.float32)
