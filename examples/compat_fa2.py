"""Code written for flash-attn 2: only the imports change.

python examples/compat_fa2.py
"""

import torch

from tilewise.compat.bert_padding import pad_input, unpad_input  # was: flash_attn.bert_padding
from tilewise.compat.fa2 import flash_attn_func, flash_attn_varlen_qkvpacked_func  # was: flash_attn

q, k, v = (torch.randn(2, 128, heads, 64, requires_grad=True) for heads in (8, 2, 2))
out = flash_attn_func(q, k, v, causal=True, window_size=(64, 0))
out.sum().backward()
print("dense:", tuple(out.shape))

qkv = torch.randn(2, 128, 3, 8, 64)
mask = torch.arange(128) < torch.tensor([[100], [37]])  # two sequences, padded
packed, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True)
print("packed:", tuple(out.shape), "padded again:", tuple(pad_input(out, indices, 2, 128).shape))
