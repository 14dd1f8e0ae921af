"""Code written for FlashAttention-4: only the import changes.

python examples/compat_fa4.py
"""

import torch

from tilewise.compat.fa4 import flash_attn_func, flash_attn_varlen_func  # was: flash_attn.cute

q, k, v = (torch.randn(2, 128, heads, 64, requires_grad=True) for heads in (8, 2, 2))
sink = torch.zeros(8, requires_grad=True)
out, lse = flash_attn_func(q, k, v, causal=True, window_size=(64, None), learnable_sink=sink)
out.sum().backward()
print("dense:", tuple(out.shape), tuple(lse.shape), "sink's gradient:", tuple(sink.grad.shape))

used = torch.tensor([100, 37], dtype=torch.int32)  # how much of each sequence's cache is filled
out, lse = flash_attn_varlen_func(q[:, :1], k, v, seqused_k=used)
print("one query for each:", tuple(out.shape))
