"""Code written for FlashAttention-3: only the import changes.

python examples/compat_fa3.py
"""

import torch

from tilewise.compat.fa3 import flash_attn_combine, flash_attn_func  # was: flash_attn_interface

q, k, v = (torch.randn(2, n, heads, 64) for n, heads in ((16, 8), (128, 2), (128, 2)))
whole = flash_attn_func(q, k, v, num_splits=0)

parts = [
    flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(96), slice(96, 128))
]
outs = torch.stack([out for out, _ in parts])
lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
joined, _ = flash_attn_combine(outs, lses)
print("keys in two parts, largest difference:", float((joined - whole).abs().max()))
