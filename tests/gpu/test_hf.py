"""Models of transformers on a GPU: whole models in bf16, against eager attention."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
from hf_models import (
    FAMILIES,
    configuration,
    gradients,
    models,
    one_by_one,
    padding,
    tokens,
)

from tilewise.compat import hf

DEVICE = "cuda"
LENGTH = 200  # several tiles, the last one not full
PACKED = torch.tensor([[*range(70), *range(5), *range(125)], [*range(1), *range(150), *range(49)]])


@pytest.fixture(autouse=True)
def registered():
    torch.manual_seed(0)
    with hf.register():
        yield


def trio(family: str):
    """Eager in fp32, the measure; and in bf16 eager and Tilewise. Weights are numbers that bf16 has."""
    eager, ours = (m.to(DEVICE, torch.bfloat16) for m in models(configuration(family, 64, window=50)))
    return copy.deepcopy(eager).float(), eager, ours


def accurate(exact, theirs, mine) -> None:
    """Within twice the error that eager makes in bf16 itself, which rounds more often than Tilewise; and
    one rounding of every number, for where eager is lucky. Only what attention has a part in: a router's
    gradient is a difference of almost equals, of which bf16 leaves nothing to compare."""
    floor = torch.finfo(torch.bfloat16).eps
    names = [name for name in exact if name == "logits" or "self_attn" in name]
    assert len(names) > 8
    for name in names:
        want = exact[name]
        scale = want.double().norm()
        error, allowed = ((t[name].double() - want.double()).norm() / scale for t in (mine, theirs))
        assert error <= 2 * allowed + floor, (name, float(error), float(allowed))


def run(model, ids, counts, **given) -> dict[str, torch.Tensor]:
    logits = model(ids, use_cache=False, **given).logits * counts[..., None]
    return {"logits": logits.detach(), **gradients(model, logits.float().sin().sum())}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, side):
    """An adapter that only works where the tests of a CPU run."""
    ids, mask = tokens(3, LENGTH).to(DEVICE), padding(side, 3, LENGTH)
    mask = None if mask is None else mask.to(DEVICE)
    counts = torch.ones_like(ids) if mask is None else mask
    accurate(*(run(model, ids, counts, attention_mask=mask) for model in trio(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed(family):
    """Sequences that see each other."""
    exact, eager, ours = trio(family)
    ids, positions = tokens(2, LENGTH).to(DEVICE), PACKED.to(DEVICE)
    results = []
    for model in (exact, eager, ours):
        if model is ours:
            logits = ours(ids, position_ids=positions, use_cache=False).logits
        else:
            logits = one_by_one(model, ids, positions)
        results.append({"logits": logits.detach(), **gradients(model, logits.float().sin().sum())})
    accurate(*results)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family, side, cache):
    """Steps that read beyond what a cache holds; with a static one transformers compiles them, into CUDA
    graphs. In fp32, where the best token is the same."""
    ids, mask = tokens(3, 40).to(DEVICE), padding(side, 3, 40)
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    options["attention_mask"] = None if mask is None else mask.to(DEVICE)
    eager, ours = (m.to(DEVICE) for m in models(configuration(family, 64, window=16)))
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_for_nothing(family):
    """A value read from the GPU in a step of one token, in each layer."""
    _, _, ours = trio(family)
    layer = ours.model.layers[0].self_attn
    shapes = ((3, 4, 1, 64), (3, 2, LENGTH, 64), (3, 2, LENGTH, 64))
    tensors = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    positions = torch.zeros(3, 1, dtype=torch.long, device=DEVICE)
    for mask in (None, padding("left", 3, LENGTH).to(DEVICE)[:, None, None].bool()):
        for mode in ("default", "error"):  # the first call compiles its kernels
            torch.cuda.set_sync_debug_mode(mode)
            try:
                hf.attention_forward(layer, *tensors, mask, scaling=0.1, position_ids=positions)
            finally:
                torch.cuda.set_sync_debug_mode("default")
