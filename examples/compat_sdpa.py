"""Code written for PyTorch's own attention: the function changes, or nothing at all.

python examples/compat_sdpa.py
"""

import torch
import torch.nn.functional as F

from tilewise.compat import sdpa

q, k, v = (torch.randn(2, 8, 128, 64) for _ in range(3))
mask = torch.rand(128, 128) > 0.1
out = sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask)
want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
print("largest difference:", float((out - want).abs().max()))

with sdpa.register():  # on a GPU, PyTorch's flash attention is Tilewise now
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    print("PyTorch's flash attention:", torch.nn.attention.current_flash_attention_impl())
