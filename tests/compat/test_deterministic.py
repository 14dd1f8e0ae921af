"""What no number on a CPU shows: ``deterministic`` reaches the core from every function."""

from __future__ import annotations

import pytest
import torch

from tilewise.compat import fa2, fa3, fa4

q, k = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
cu = torch.tensor([0, 4], dtype=torch.int32)
CALLS = {
    "fa2": (fa2, "flash_attn_func", (q, k, k)),
    "fa2 varlen": (fa2, "flash_attn_varlen_func", (q[0], k[0], k[0], cu, cu, 4, 4)),
    "fa2 qkv": (fa2, "flash_attn_qkvpacked_func", (torch.randn(2, 4, 3, 2, 8),)),
    "fa2 kv": (fa2, "flash_attn_kvpacked_func", (q, torch.randn(2, 4, 2, 2, 8))),
    "fa2 varlen qkv": (fa2, "flash_attn_varlen_qkvpacked_func", (torch.randn(4, 3, 2, 8), cu, 4)),
    "fa2 varlen kv": (
        fa2,
        "flash_attn_varlen_kvpacked_func",
        (q[0], torch.randn(4, 2, 2, 8), cu, cu, 4, 4),
    ),
    "fa3": (fa3, "flash_attn_func", (q, k, k)),
    "fa3 varlen": (fa3, "flash_attn_varlen_func", (q[0], k[0], k[0], cu, cu, 4, 4)),
    "fa3 qkv": (fa3, "flash_attn_qkvpacked_func", (torch.randn(2, 4, 3, 2, 8),)),
    "fa4": (fa4, "flash_attn_func", (q, k, k)),
    "fa4 varlen": (fa4, "flash_attn_varlen_func", (q[0], k[0], k[0], None, cu, cu, 4, 4)),
}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("module", "name", "arguments"), CALLS.values(), ids=CALLS)
def test_deterministic_arrives(monkeypatch, module, name, arguments, asked):
    """A promise of equal bits that is dropped on the way."""
    seen = []

    def recorded(core):
        def call(*tensors, **options):
            seen.append(options["deterministic"])
            return core(*tensors, **options)

        return call

    for core in ("attention", "attention_varlen"):
        monkeypatch.setattr(module, core, recorded(getattr(module, core)))
    getattr(module, name)(*arguments, deterministic=asked)
    assert seen == [asked]
