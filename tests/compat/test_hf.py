"""``tilewise.compat.hf`` against the eager attention of transformers, in small models made up here."""

from __future__ import annotations

import copy
import functools
import math
import subprocess
import sys
from inspect import signature

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
from hf_models import (  # noqa: E402
    FAMILIES,
    LENGTH,
    PACKED,
    configuration,
    gradients,
    models,
    one_by_one,
    padding,
    sizes,
    tokens,
)
from transformers import masking_utils, modeling_utils  # noqa: E402

from tilewise import UnsupportedError  # noqa: E402
from tilewise.compat import hf  # noqa: E402

CACHE = (
    "cache" if "cache" in signature(transformers.LlamaModel.forward).parameters else "past_key_values"
)
TIGHT = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def registered():
    torch.manual_seed(0)
    with hf.register():
        yield


@functools.cache
def pair(family):
    with hf.register():
        return models(configuration(family))


def same_gradients(got, want) -> None:
    assert got.keys() == want.keys()
    for name, g in want.items():
        assert (got[name] - g).norm() <= 2e-5 * g.norm() + 1e-7, name


class Reads(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
        self.count += func in waits
        return func(*args, **(kwargs or {}))


# Whole models.


@pytest.mark.parametrize("side", [None, "left", "right", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, side):
    """A mask off by one, a softcap or a sink dropped, padding seen, key heads paired wrongly."""
    eager, ours = pair(family)
    ids, mask = tokens(), padding(side)
    counts = torch.ones_like(ids) if mask is None else mask
    logits, losses = [], []
    for model in (eager, ours):
        out = model(ids, attention_mask=mask).logits * counts[..., None]
        logits.append(out)
        losses.append(out.sin().sum())
    torch.testing.assert_close(logits[1], logits[0], **TIGHT)
    same_gradients(gradients(ours, losses[1]), gradients(eager, losses[0]))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family, side, cache):
    """Steps aligned to the top left; a static cache's empty part seen; a window that slides twice."""
    ids, mask = tokens(), padding(side)
    answers = [
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=9,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in pair(family)
    ]
    assert torch.equal(answers[1].sequences, answers[0].sequences)
    for got, want in zip(answers[1].logits, answers[0].logits, strict=True):
        torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces(family, side, kind):
    """Several queries after a cache that holds more, or fewer, keys than there are queries."""
    ids, mask = tokens(), padding(side)
    logits = []
    for model in pair(family):
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 6)
        else:
            cache = transformers.DynamicCache(config=model.config)
        parts = []
        for begin, stop in ((0, 7), (7, 10), (10, LENGTH)):
            given = None if mask is None else mask[:, :stop]
            with torch.no_grad():
                out = model(ids[:, begin:stop], attention_mask=given, use_cache=True, **{CACHE: cache})
            parts.append(out.logits)
        whole = torch.cat(parts, 1)
        logits.append(whole if mask is None else whole * mask[..., None])
    torch.testing.assert_close(logits[1], logits[0], **TIGHT)


@pytest.fixture
def calls(monkeypatch):
    """How the core was called: dense or packed."""
    seen = []
    for name in ("attention", "attention_varlen"):
        function = getattr(hf, name)

        def spy(*args, _name=name, _function=function, **keywords):
            seen.append((_name, keywords))
            return _function(*args, **keywords)

        monkeypatch.setattr(hf, name, spy)
    return seen


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_by_position_ids(family, use_cache, calls):
    """Sequences that see each other: also where a model, or one with a cache, makes masks without them;
    a score matrix in the place of attention_varlen."""
    eager, ours = pair(family)
    ids = tokens(2)
    want = one_by_one(eager, ids, PACKED)
    got = ours(ids, position_ids=PACKED, use_cache=use_cache).logits
    torch.testing.assert_close(got, want, **TIGHT)
    assert [name for name, _ in calls] == ["attention_varlen"] * 2
    assert all(keywords["max_seqlen_q"] < 16 for _, keywords in calls)  # not the row's length
    same_gradients(gradients(ours, got.sin().sum()), gradients(eager, want.sin().sum()))


@pytest.mark.parametrize("whole", ["int", "tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_by_cu_seq_lens(family, whole, calls):
    """The flash implementations' keywords dropped; int64 boundaries; lengths in tensors."""
    eager, ours = pair(family)
    ids, positions = tokens(1, 17), PACKED[:1]
    cu = torch.tensor([0, 7, 8, 11, 17], dtype=torch.int64 if whole == "int" else torch.int32)
    longest = 7 if whole == "int" else torch.tensor(7)
    lengths = {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    got = ours(ids, position_ids=positions, use_cache=False, seq_idx=torch.zeros(1, 17).int(), **lengths)
    torch.testing.assert_close(got.logits, one_by_one(eager, ids, positions), **TIGHT)
    assert {name for name, _ in calls} == {"attention_varlen"}


@pytest.mark.parametrize("inference", [False, True])  # where tensors have no version
def test_position_ids_that_change_in_place(inference):
    """What was read of a buffer before it was filled anew."""
    _, ours = pair("llama")
    with torch.inference_mode(inference), torch.no_grad():
        ids, positions = tokens(1), PACKED[:1].clone()
        ours(ids, position_ids=positions, use_cache=True)
        positions.copy_(torch.arange(LENGTH))
        got = ours(ids, position_ids=positions, use_cache=True).logits
        torch.testing.assert_close(got, ours(ids, use_cache=True).logits, **TIGHT)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, packed, reentrant):
    """A mask that does not survive the second forward."""
    _, ours = pair(family)
    ids = tokens(2)
    mask = {"position_ids": PACKED} if packed else {"attention_mask": padding("left", 2)}
    keep = torch.ones(2, LENGTH) if packed else mask["attention_mask"]

    def run(model):
        loss = (model(ids, use_cache=False, **mask).logits * keep[..., None]).sin().sum()
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = run(ours)
    again = copy.deepcopy(ours).train()
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again.enable_input_require_grads()
    assert again.is_gradient_checkpointing
    same_gradients(run(again), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_steps(family):
    """A loss that goes its own way after an optimizer's step."""
    ids, mask = tokens(), padding("right")
    losses = []
    for model in map(copy.deepcopy, pair(family)):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family, side):
    """Queries that rotary embeddings left in fp32 beside values in bf16; a result in another dtype.

    The measure is eager in fp32, the bound twice what bf16 does to eager itself.
    """
    eager, ours = pair(family)
    ids, mask = tokens(), padding(side)
    counts = torch.ones(3, LENGTH) if mask is None else mask.float()
    with torch.no_grad():
        exact = eager(ids, attention_mask=mask).logits * counts[..., None]
        with torch.autocast("cpu", torch.bfloat16):
            theirs, mine = (
                m(ids, attention_mask=mask).logits * counts[..., None] for m in (eager, ours)
            )
    error, allowed = ((t.float() - exact).norm() / exact.norm() for t in (mine, theirs))
    assert 0 < error < 2 * allowed < 0.2
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(ids, attention_mask=mask, labels=ids).loss
    assert all(g.isfinite().all() for g in gradients(ours, loss).values())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_generate_compiled(family):
    """Python that cannot be traced in a step, which transformers compiles whole on GPUs."""
    whole = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    whole._compile_all_devices = True
    eager, ours = pair(family)
    ids, options = tokens(), {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options["attention_mask"] = padding("left")
    want = eager.generate(ids, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(ours.generate(ids, **options, compile_config=whole), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_compiled():
    """Python that torch.compile cannot follow; sequences that see each other once compiled."""
    _, ours = pair("llama")
    compiled = torch.compile(copy.deepcopy(ours), backend="eager")
    ids = tokens(2)
    for given in ({}, {"attention_mask": padding("left", 2)}, {"position_ids": PACKED}):
        want, got = (model(ids, use_cache=False, **given).logits for model in (ours, compiled))
        torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.parametrize("kind", ["float", "heads", "bool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_ones_own(family, kind):
    """A custom mask to which the causal one, or a window, is added."""
    eager, ours = pair(family)
    ids = tokens(2)
    seen = torch.rand(2, 4 if kind == "heads" else 1, LENGTH, LENGTH) > 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    want = eager(ids, attention_mask=added, use_cache=False).logits
    got = ours(ids, attention_mask=seen if kind == "bool" else added, use_cache=False).logits
    torch.testing.assert_close(got, want, **TIGHT)


def test_an_encoder():
    """A bidirectional window, half as wide or a key too wide; padding on either side of it."""
    config = transformers.ModernBertConfig(
        **sizes(), local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    )
    eager, ours = models(config, transformers.AutoModel)
    for side in (None, "right", "left"):
        ids, mask = tokens(), padding(side)
        counts = torch.ones(3, LENGTH) if mask is None else mask
        want, got = (
            m(ids, attention_mask=mask).last_hidden_state * counts[..., None] for m in (eager, ours)
        )
        torch.testing.assert_close(got, want, **TIGHT)


def test_an_encoder_and_a_decoder():
    """Cross-attention taken for causal; T5's position_bias, and its gradient, dropped."""
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    eager, ours = models(config, transformers.AutoModelForSeq2SeqLM)
    ids, mask, labels = tokens(), padding("right"), tokens(3, 11)
    outs = [m(ids, attention_mask=mask, labels=labels) for m in (eager, ours)]
    torch.testing.assert_close(outs[1].logits, outs[0].logits, **TIGHT)
    grads = [
        torch.autograd.grad(out.loss, list(m.parameters()))
        for m, out in zip((eager, ours), outs, strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    written = [m.generate(ids, attention_mask=mask, max_new_tokens=8) for m in (eager, ours)]
    assert torch.equal(*written)


# Masks alone: what transformers may ask for, seen through the attention of one layer.


class Layer(torch.nn.Module):
    def __init__(self, is_causal: bool = True):
        super().__init__()
        self.is_causal = is_causal


def heads(queries: int, keys: int, batch: int = 3) -> tuple[torch.Tensor, ...]:
    shapes = ((batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
    return tuple(torch.randn(shape) for shape in shapes)


def textbook(q, k, v, seen) -> torch.Tensor:
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


causal = masking_utils.causal_mask_function


def alternating(b, h, i, j):
    return (i - j) % 3 == 0


def everything(b, h, i, j):
    return i >= 0


FUNCTIONS = {
    "causal": causal,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "wide window": masking_utils.sliding_window_causal_mask_function(400),
    "two windows": masking_utils.and_masks(
        masking_utils.sliding_window_overlay(3), masking_utils.sliding_window_causal_mask_function(6)
    ),
    "no end": masking_utils.sliding_window_overlay(4),
    "chunks": masking_utils.and_masks(causal, alternating),
    "prefix": masking_utils.or_masks(causal, alternating),
    "everything": everything,
    "packed": masking_utils.and_masks(
        causal, masking_utils.packed_sequence_mask_function(torch.arange(20).expand(3, -1) // 6)
    ),
}
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    FUNCTIONS["other positions"] = masking_utils.remap_positions_for_packed_sequence(
        causal, torch.arange(20).flip(0).expand(3, -1)
    )
if hasattr(masking_utils, "bidirectional_mask_function"):
    FUNCTIONS["both sides"] = masking_utils.bidirectional_mask_function
if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
    FUNCTIONS["window on both sides"] = masking_utils.sliding_window_bidirectional_mask_function(3)

#: queries, keys, where queries begin, where keys begin
PLACES = {
    "no cache": (9, 9, 0, 0),
    "more keys": (4, 9, 5, 0),
    "sliding cache": (4, 9, 12, 7),
    "static cache, empty": (6, 14, 0, 0),
    "static cache": (4, 14, 5, 0),
    "one query": (1, 9, 8, 0),
    "one query, static": (1, 14, 5, 0),
    "keys missing": (5, 7, 6, 0),
    "queries first": (6, 4, 0, 2),
}


def ask(function, place, given=None, on_device=False, **options):
    queries, keys, offset, key_offset = place
    offset = torch.tensor(offset) if on_device else offset
    return {
        "batch_size": 3,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": offset,
        "kv_offset": key_offset,
        "mask_function": function,
        "attention_mask": given,
        "allow_is_causal_skip": True,
        "dtype": torch.float32,
        "device": "cpu",
        **options,
    }


needs_offsets = pytest.mark.skipif(
    not hasattr(masking_utils, "sliding_window_bidirectional_mask_function"),
    reason="this transformers asks for masks in other words",
)


@needs_offsets
@pytest.mark.parametrize("side", [None, "left", "right", "holes"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_mask(name, place, side):
    """A band recognised where there is none, moved by a cache, or told by the layer, not the mask."""
    queries, keys, offset, _ = PLACES[place]
    stop = offset + queries
    given = None if side is None else padding(side, 3, stop).bool()
    seen = masking_utils.sdpa_mask(
        **ask(FUNCTIONS[name], PLACES[place], given, allow_is_causal_skip=False)
    )
    q, k, v = heads(queries, keys)
    want = textbook(q, k, v, seen)
    counts = torch.ones(3, queries, dtype=torch.bool) if given is None else given[:, offset:stop]
    two_sided = "both sides" in name
    skip = {"allow_is_causal_skip": not two_sided, "allow_is_bidirectional_skip": two_sided}
    for on_device in (False, True):
        mask = hf.attention_mask(**ask(FUNCTIONS[name], PLACES[place], given, on_device, **skip))
        got, weights = hf.attention_forward(Layer(not two_sided), q, k, v, mask)
        assert weights is None and got.shape == (3, queries, 4, 8)
        torch.testing.assert_close(got[counts], want[counts], **TIGHT)


@needs_offsets
def test_bands_are_not_written_out():
    """A score matrix of booleans for what three integers say."""
    place = (900, 1000, 100, 0)
    given = torch.ones(3, 1000, dtype=torch.bool)
    for name in ("causal", "wide window", "window"):
        for full in (None, given):
            mask = hf.attention_mask(**ask(FUNCTIONS[name], place, full))
            assert (mask is None) == (name == "causal") or mask.numel() == 0
    given[1, :30] = False
    for name in ("causal", "window"):
        mask = hf.attention_mask(**ask(FUNCTIONS[name], place, given))
        assert mask.untyped_storage().nbytes() <= 3000
    behind = torch.arange(1000) < torch.tensor([[1000], [900], [10]])
    assert hf.attention_mask(**ask(causal, place, behind)) is None


@needs_offsets
def test_a_mask_that_must_be_written_out():
    """A band handed to a model that goes on to combine the mask with another."""
    mask = hf.attention_mask(**ask(causal, PLACES["no cache"], allow_is_causal_skip=False))
    assert mask.dtype == torch.bool and mask.shape == (3, 1, 9, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_does_not_grow_with_layers(family):
    """A GPU waited for in each layer, or in a step of one token."""
    counts = []
    for layers in (2, 6):
        config = configuration(family)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = ["sliding_attention", "full_attention"] * (layers // 2)
        _, ours = models(config)
        ids, mask = tokens(), padding("left")
        with torch.no_grad():
            out = ours.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        prompt, step, packed = Reads(), Reads(), Reads()
        with torch.no_grad(), prompt:
            ours(ids, attention_mask=mask, use_cache=False)
        with torch.no_grad(), packed:
            ours(ids, position_ids=PACKED[:1].expand(3, -1), use_cache=False)
        longer = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1)
        with torch.no_grad(), step:
            ours(ids[:, :1], attention_mask=longer, use_cache=True, **{CACHE: out[CACHE]})
        counts.append((prompt.count, packed.count, step.count))
    assert counts[0] == counts[1]


@needs_offsets
@pytest.mark.parametrize("side", [None, "left"])
def test_any_packed_mask(side):
    """Padding dropped from the mask of packed sequences, or a window."""
    segments = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1], [0] * 9, [0, 1, 2, 2, 2, 2, 2, 2, 2]])
    packed = masking_utils.packed_sequence_mask_function(segments)
    function = masking_utils.and_masks(FUNCTIONS["window"], packed)
    given = None if side is None else padding(side, 3, 9).bool()
    asked = ask(function, PLACES["no cache"], given, allow_is_causal_skip=False)
    q, k, v = heads(9, 9)
    mask = hf.attention_mask(**asked)
    assert mask.dtype == (torch.int32 if side is None else torch.bool)
    got, _ = hf.attention_forward(Layer(), q, k, v, mask)
    torch.testing.assert_close(got, textbook(q, k, v, masking_utils.sdpa_mask(**asked)), **TIGHT)


@needs_offsets
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("place", ["one query", "one query, static"])
def test_a_step_reads_nothing(place, on_device):
    """A GPU waited for at each new token, though one row of a mask costs nothing to write out."""
    given = padding("left", 3, sum(PLACES[place][::2])).bool()
    with Reads() as reads:
        for mask in (given, None):
            hf.attention_mask(**ask(FUNCTIONS["window"], PLACES[place], mask, on_device))
    assert reads.count == 0


# One layer: its arguments.


def test_the_layers_arguments():
    """sliding_window off by one, or on one side only; is_causal of the call or the module ignored."""
    q, k, v = heads(7, 9)
    i, j = torch.arange(7)[:, None] + 2, torch.arange(9)
    for is_causal, window, seen in (
        (None, None, j <= i),
        (False, None, j < 9),
        (True, 3, (j <= i) & (j > i - 3)),
        (False, 3, (j - i).abs() < 3),
    ):
        got, _ = hf.attention_forward(Layer(), q, k, v, None, is_causal=is_causal, sliding_window=window)
        torch.testing.assert_close(got, textbook(q, k, v, seen.expand(7, 9)), **TIGHT)
    got, _ = hf.attention_forward(Layer(False), q, k, v, None)
    torch.testing.assert_close(got, textbook(q, k, v, torch.ones(7, 9).bool()), **TIGHT)
    got, _ = hf.attention_forward(Layer(), q, k, v, None, scaling=0.0625)
    torch.testing.assert_close(got, textbook(q * 8**0.5 / 16, k, v, j <= i), **TIGHT)


def test_dropout():
    """Dropout without training, or none with it; weights not made up for."""
    q, k = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8)
    eye = torch.eye(64).expand(2, 4, 64, 64)  # with which the output is the weights
    whole, _ = hf.attention_forward(Layer(False).eval(), q, k, eye, None, dropout=0.25)
    assert (whole > 0).all()
    dropped, _ = hf.attention_forward(Layer(False).train(), q, k, eye, None, dropout=0.25)
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)


def test_dropout_of_a_model(calls):
    """attention_dropout of the configuration not reaching the kernel."""
    config = configuration("llama")
    config.attention_dropout = 0.5
    _, ours = models(config)
    ours.train()(tokens(), use_cache=False)
    assert [keywords["dropout_p"] for _, keywords in calls] == [0.5, 0.5]


CU = torch.tensor([0, 7, 17], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 10, "max_length_k": 10}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_attentions": True}, UnsupportedError, "output_attentions"),
        ({"head_mask": torch.ones(2, 4)}, UnsupportedError, "head_mask"),
        ({"block_table": torch.zeros(3, 1).int(), **LENGTHS}, UnsupportedError, "block_table"),
        ({"something_new": "x"}, UnsupportedError, "something_new"),
        ({"seq_idx": torch.zeros(1, 17).int()}, UnsupportedError, "seq_idx"),
        (
            {"attention_mask": torch.ones(1, 1, 17, 17).bool(), **LENGTHS},
            UnsupportedError,
            "attention_mask",
        ),
        (
            {"attention_mask": torch.tensor([[0] + [1] * 16]), **LENGTHS},
            UnsupportedError,
            "attention_mask",
        ),
        ({"cu_seq_lens_q": CU}, TypeError, "cu_seq_lens_k"),
        ({"cu_seq_lens_q": CU, "cu_seq_lens_k": CU}, ValueError, "max_length_q"),
        ({"max_length_q": 3}, TypeError, "cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 1, 17, 17).long()}, TypeError, r"attention_mask\.dtype"),
        ({"attention_mask": torch.ones(1, 1, 17, 16).bool()}, ValueError, r"bias\.shape"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_is_refused(arguments, error, message):
    """An argument dropped, and a result that is another's."""
    _, ours = pair("llama")
    with pytest.raises(error, match=message):
        ours(tokens(1), use_cache=False, **arguments)


def test_a_bias_of_packed_sequences_is_refused():
    """position_bias dropped where sequences are packed."""
    bias = torch.zeros(1, 4, 17, 17)
    with pytest.raises(UnsupportedError, match="position_bias"):
        hf.attention_forward(Layer(), *heads(17, 17, 1), None, position_bias=bias, **LENGTHS)


def test_deterministic_reaches_the_core(calls):
    """ModernBERT's deterministic dropped."""
    hf.attention_forward(Layer(), *heads(9, 9), None, deterministic=True)
    assert calls[0][1]["deterministic"] is True


def test_a_mask_of_another_dtype():
    """A mask in fp16 beside queries in fp32, which the core has no bias for; the gradient of a mask."""
    q, k, v = heads(9, 9)
    added = torch.randn(3, 4, 9, 9).half().requires_grad_()
    got, _ = hf.attention_forward(Layer(), q, k, v, added)
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    weights = (q @ keys.transpose(2, 3) * 8**-0.5 + added.float()).softmax(-1)
    want = (weights @ values).transpose(1, 2)
    torch.testing.assert_close(got, want, **TIGHT)
    grads = [torch.autograd.grad(out.sin().sum(), added)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-3)  # in fp16


def test_masks_of_another_rank():
    """A mask of tokens, which says nothing of queries, broadcast along the wrong dimensions."""
    with pytest.raises(ValueError, match=r"attention_mask\.shape"):
        hf.attention_forward(Layer(), *heads(9, 9), torch.ones(3, 9).bool())


def test_weights_asked_for_in_the_configuration():
    """Weights that are None where the configuration asks for them."""
    _, ours = pair("llama")
    ours = copy.deepcopy(ours)
    ours.config._output_attentions = True
    with pytest.raises(UnsupportedError, match="output_attentions"):
        ours(tokens(1))


# The registries.


def registries() -> tuple[dict, dict]:
    return (
        modeling_utils.AttentionInterface._global_mapping,
        masking_utils.AttentionMaskInterface._global_mapping,
    )


def test_register_and_remove():
    """A registration that stays, or that removes another's."""
    with hf.register():
        assert all("tilewise" in registry for registry in registries())
    assert all("tilewise" in registry for registry in registries())  # the fixture's, still
    mine = hf.register()
    modeling_utils.AttentionInterface.register("tilewise", textbook)
    mine.remove()
    mine.remove()
    assert registries()[0]["tilewise"] is textbook
    modeling_utils.AttentionInterface.register("tilewise", hf.attention_forward)


def test_removed_it_is_unknown():
    """A model that runs something else under the name."""
    for registry in registries():
        registry.pop("tilewise")
    registered = hf.register()
    registered.remove()
    assert not any("tilewise" in registry for registry in registries())
    with pytest.raises(ValueError, match="tilewise"):
        transformers.AutoModelForCausalLM.from_config(
            configuration("llama"), attn_implementation="tilewise"
        )


def test_a_model_switches():
    """A model that was made with another implementation."""
    eager, _ = pair("llama")
    model, ids = copy.deepcopy(eager), tokens()
    model.set_attn_implementation("tilewise")
    model.config.output_attentions = False
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, **TIGHT)


@pytest.mark.parametrize(
    ("module", "name"),
    [(modeling_utils, "AttentionInterface"), (masking_utils, "AttentionMaskInterface")],
)
def test_an_older_transformers_is_named(monkeypatch, module, name):
    """AttributeError from inside of it; half a registration."""
    before = [dict(registry) for registry in registries()]
    monkeypatch.delattr(module, name)
    with pytest.raises(
        UnsupportedError, match=f"transformers, {transformers.__version__}, has no .*{name}"
    ):
        hf.register()
    monkeypatch.undo()
    assert [dict(registry) for registry in registries()] == before


def test_without_transformers():
    """An ImportError that does not tell what to install."""
    code = "import sys; sys.modules['transformers'] = None; import tilewise; import tilewise.compat.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ImportError: tilewise.compat.hf needs transformers: pip install" in done.stderr
