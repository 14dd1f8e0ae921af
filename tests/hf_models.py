"""Small models of transformers, made up here, for the tests of its adapter: no weights to download."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 97
LENGTH = 17  # tokens in a row, unless asked otherwise
FAMILIES = ["llama", "gemma2", "mistral", "gpt_oss"]

#: Position ids of packed sequences: 7, 1, 3 and 6 tokens in the first row, 11 and 6 in the second.
PACKED = torch.tensor([[*range(7), 0, *range(3), *range(6)], [*range(11), *range(6)]])


def sizes(head_dim: int = 8) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }


def configuration(family: str, head_dim: int = 8, window: int = 5) -> Any:
    common = {**sizes(head_dim), "num_key_value_heads": 2, "head_dim": head_dim}
    if family == "llama":
        return transformers.LlamaConfig(**common)
    common["sliding_window"] = window
    if family == "mistral":
        return transformers.MistralConfig(**common)
    if family == "gemma2":
        caps = {"query_pre_attn_scalar": head_dim, "attn_logit_softcapping": 2.0}
        return transformers.Gemma2Config(**common, **caps)
    # Every expert for every token: a choice among them would leap where scores differ in the last bit.
    return transformers.GptOssConfig(**common, num_local_experts=2, num_experts_per_tok=2)


def models(config: Any, make: Any = transformers.AutoModelForCausalLM) -> tuple[Any, Any]:
    """The same weights twice: with eager attention, and with Tilewise, which must be registered."""
    torch.manual_seed(1)
    eager = make.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():  # scores of several units: attention that matters, and caps that bite
        for name, weight in eager.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)
            elif name.endswith("sinks"):
                weight.normal_()
    ours = make.from_config(copy.deepcopy(config), attn_implementation="tilewise").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "tilewise"
    return eager, ours


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padding(side: str | None, batch: int = 3, length: int = LENGTH) -> Tensor | None:
    """(batch, length): the first row is full, a quarter and a half of the next two are padding."""
    if side is None:
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    for b, pads in enumerate((0, length // 4, length // 2)[:batch]):
        if side == "left":
            mask[b, :pads] = 0
        elif side == "right":
            mask[b, length - pads :] = 0
        elif side == "holes" and b:
            mask[b, pads : pads + 3] = 0
    return mask


def one_by_one(model: Any, ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of packed sequences, none of which can know of another."""
    logits = []
    for row, positions in zip(ids, position_ids, strict=True):
        starts = positions.eq(0).nonzero().flatten().tolist()
        for begin, stop in pairwise([*starts, len(row)]):
            logits.append(model(row[None, begin:stop], use_cache=False).logits[0])
    return torch.cat(logits).view(*ids.shape, -1)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters)
    return dict(zip(names, grads, strict=True))
