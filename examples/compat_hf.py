"""A model of transformers: one line, and the name of its attention.

python examples/compat_hf.py
"""

import torch
from transformers import AutoModelForCausalLM, MistralConfig

from tilewise.compat import hf

hf.register()
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 16}
config = MistralConfig(**sizes, **heads, pad_token_id=0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")  # was: "eager"

ids = torch.randint(1, 100, (2, 40))
mask = torch.ones_like(ids)
mask[1, :25] = 0  # the second prompt is shorter
model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
print("generated:", model.generate(ids, attention_mask=mask, max_new_tokens=8)[:, 40:].tolist())
