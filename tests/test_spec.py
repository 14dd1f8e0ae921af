"""tilewise.spec: every argument is checked once; a message says which, its value and what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from tilewise import attention, attention_varlen, explain
from tilewise.spec import DTYPES, Inputs, check_values, make_spec, sequences


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense(**changes: Any) -> dict[str, Any]:
    """Arguments of ``attention``: B 2, Sq 5, Sk 6, Hq 4, Hkv 2, D 8, Dv 7."""
    return {"q": normal(2, 5, 4, 8), "k": normal(2, 6, 2, 8), "v": normal(2, 6, 2, 7)} | changes


def varlen(**changes: Any) -> dict[str, Any]:
    """Arguments of ``attention_varlen``: two sequences of (3, 4) and (2, 2) rows."""
    return {
        "q": normal(5, 4, 8),
        "k": normal(6, 2, 8),
        "v": normal(6, 2, 7),
        "cu_seqlens_q": ints(0, 3, 5),
        "cu_seqlens_k": ints(0, 4, 6),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    } | changes


def fp8() -> dict[str, Any]:
    """The tensors of ``dense`` in fp8."""
    return {name: t.to(torch.float8_e4m3fn) for name, t in dense().items()}


def test_the_arguments_that_the_bad_ones_differ_from_are_good():
    attention(**dense())
    attention_varlen(**varlen())


# What is wrong: the error, the arguments that differ, the whole message.
BAD_DENSE = {
    "q rank": (
        ValueError,
        {"q": normal(5, 4, 8)},
        "q.shape: got (5, 4, 8); allowed is rank 4, (B, S, heads, head_dim)",
    ),
    "k rank": (
        ValueError,
        {"k": normal(1, 2, 6, 2, 8)},
        "k.shape: got (1, 2, 6, 2, 8); allowed is rank 4, (B, S, heads, head_dim)",
    ),
    "v rank": (
        ValueError,
        {"v": normal(6, 7)},
        "v.shape: got (6, 7); allowed is rank 4, (B, S, heads, head_dim)",
    ),
    "q dtype": (
        TypeError,
        {"q": torch.zeros(2, 5, 4, 8, dtype=torch.int32)},
        "q.dtype: got torch.int32; allowed is fp16, bf16, fp32, fp64, fp8",
    ),
    "dtype mix of k": (
        TypeError,
        {"k": normal(2, 6, 2, 8, dtype=torch.float16)},
        "k.dtype: got torch.float16; allowed is q's, torch.float32",
    ),
    "dtype mix of v": (
        TypeError,
        {"v": normal(2, 6, 2, 7, dtype=torch.bfloat16)},
        "v.dtype: got torch.bfloat16; allowed is q's, torch.float32",
    ),
    "q quantized": (
        TypeError,
        {"q": torch.quantize_per_tensor(normal(2, 5, 4, 8), 0.1, 0, torch.quint8)},
        "q.dtype: got torch.quint8; allowed is fp16, bf16, fp32, fp64, fp8",
    ),
    "batch": (
        ValueError,
        {"k": normal(3, 6, 2, 8), "v": normal(3, 6, 2, 7)},
        "k batch size: got 3; allowed is q's, 2",
    ),
    "head dim of k": (ValueError, {"k": normal(2, 6, 2, 9)}, "k head dim: got 9; allowed is q's, 8"),
    "head dim too large": (
        ValueError,
        {"q": normal(2, 5, 4, 257), "k": normal(2, 6, 2, 257)},
        "q head dim: got 257; allowed is 1 to 256",
    ),
    "head dim zero": (
        ValueError,
        {"q": normal(2, 5, 4, 0), "k": normal(2, 6, 2, 0)},
        "q head dim: got 0; allowed is 1 to 256",
    ),
    "value head dim too large": (
        ValueError,
        {"v": normal(2, 6, 2, 300)},
        "v head dim: got 300; allowed is 1 to 256",
    ),
    "length of v": (
        ValueError,
        {"v": normal(2, 7, 2, 7)},
        "v length: got 7; allowed is k's, 6",
    ),
    "heads of v": (
        ValueError,
        {"v": normal(2, 6, 4, 7)},
        "v heads: got 4; allowed is k's, 2",
    ),
    "batch of v": (ValueError, {"v": normal(3, 6, 2, 7)}, "v batch size: got 3; allowed is k's, 2"),
    "heads not a multiple": (
        ValueError,
        {"k": normal(2, 6, 3, 8), "v": normal(2, 6, 3, 7)},
        "q heads: got 4; allowed is a multiple of k's heads, 3, both at least 1",
    ),
    "no key heads": (
        ValueError,
        {"k": normal(2, 6, 0, 8), "v": normal(2, 6, 0, 7)},
        "q heads: got 4; allowed is a multiple of k's heads, 0, both at least 1",
    ),
    "no query heads": (
        ValueError,
        {"q": normal(2, 5, 0, 8)},
        "q heads: got 0; allowed is a multiple of k's heads, 2, both at least 1",
    ),
    "device mix": (
        ValueError,
        {"k": torch.zeros(2, 6, 2, 8, device="meta")},
        "k.device: got device(type='meta'); allowed is q's, cpu",
    ),
    "device mix of the bias": (
        ValueError,
        {"bias": torch.zeros(1, 1, 5, 6, device="meta")},
        "bias.device: got device(type='meta'); allowed is q's, cpu",
    ),
    "scale zero": (
        ValueError,
        {"scale": 0.0},
        "scale: got 0.0; allowed is None or a number from 2**-60 to 2**60",
    ),
    "scale negative": (
        ValueError,
        {"scale": -1},
        "scale: got -1.0; allowed is None or a number from 2**-60 to 2**60",
    ),
    "scale NaN": (
        ValueError,
        {"scale": math.nan},
        "scale: got nan; allowed is None or a number from 2**-60 to 2**60",
    ),
    "scale a string": (TypeError, {"scale": "1"}, "scale: got '1' (str); allowed is a number or None"),
    "softcap zero": (
        ValueError,
        {"softcap": 0.0},
        "softcap: got 0.0; allowed is None or a number from 2**-60 to 2**60",
    ),
    "softcap negative": (
        ValueError,
        {"softcap": -2.0},
        "softcap: got -2.0; allowed is None or a number from 2**-60 to 2**60",
    ),
    "softcap infinite": (
        ValueError,
        {"softcap": math.inf},
        "softcap: got inf; allowed is None or a number from 2**-60 to 2**60",
    ),
    "dropout one": (ValueError, {"dropout_p": 1.0}, "dropout_p: got 1.0; allowed is in [0, 1)"),
    "dropout negative": (ValueError, {"dropout_p": -0.1}, "dropout_p: got -0.1; allowed is in [0, 1)"),
    "dropout NaN": (ValueError, {"dropout_p": math.nan}, "dropout_p: got nan; allowed is in [0, 1)"),
    "dropout None": (
        TypeError,
        {"dropout_p": None},
        "dropout_p: got None (NoneType); allowed is a number",
    ),
    "algorithm": (
        ValueError,
        {"algorithm": "fa9"},
        "algorithm: got 'fa9'; allowed is one of auto, fa1, fa2, fa3, fa4",
    ),
    "algorithm a number": (TypeError, {"algorithm": 2}, "algorithm: got 2 (int); allowed is a string"),
    "backend": (
        ValueError,
        {"backend": "gpu"},
        "backend: got 'gpu'; allowed is one of auto, cpu, triton, hopper, blackwell",
    ),
    "layout": (ValueError, {"layout": "sbhd"}, "layout: got 'sbhd'; allowed is one of bshd, bhsd"),
    "causal a number": (TypeError, {"causal": 1}, "causal: got 1 (int); allowed is a bool"),
    "deterministic a string": (
        TypeError,
        {"deterministic": "no"},
        "deterministic: got 'no' (str); allowed is a bool",
    ),
    "window a number": (ValueError, {"window": 5}, "window: got 5; allowed is a pair (left, right)"),
    "window of three": (
        ValueError,
        {"window": (1, 2, 3)},
        "window: got (1, 2, 3); allowed is a pair (left, right)",
    ),
    "window not integer": (
        TypeError,
        {"window": (1.5, None)},
        "window[0]: got 1.5 (float); allowed is an integer or None",
    ),
    "window too large": (
        ValueError,
        {"window": (0, 2**31)},
        "window[1]: got 2147483648; allowed is None or a 32-bit integer",
    ),
    "bias does not broadcast": (
        ValueError,
        {"bias": normal(2, 3, 5, 6)},
        "bias.shape: got (2, 3, 5, 6); allowed is (2|1, 4|1, 5|1, 6|1)",
    ),
    "bias transposed": (
        ValueError,
        {"bias": normal(1, 1, 6, 5)},
        "bias.shape: got (1, 1, 6, 5); allowed is (2|1, 4|1, 5|1, 6|1)",
    ),
    "bias rank": (
        ValueError,
        {"bias": normal(5, 6)},
        "bias.shape: got (5, 6); allowed is (2|1, 4|1, 5|1, 6|1)",
    ),
    "bias dtype": (
        TypeError,
        {"bias": normal(1, 1, 5, 6, dtype=torch.float16)},
        "bias.dtype: got torch.float16; allowed is torch.float32 or q's, torch.float32",
    ),
    "bias a bool mask": (
        TypeError,
        {"bias": torch.ones(1, 1, 5, 6, dtype=torch.bool)},
        "bias.dtype: got torch.bool; allowed is torch.float32 or q's, torch.float32",
    ),
    "bias a number": (TypeError, {"bias": 1.0}, "bias: got float; allowed is a tensor or None"),
    "alibi shape": (
        ValueError,
        {"alibi_slopes": normal(2)},
        "alibi_slopes.shape: got (2,); allowed is (4,) or (2, 4)",
    ),
    "alibi dtype": (
        TypeError,
        {"alibi_slopes": normal(4, dtype=torch.float64)},
        "alibi_slopes.dtype: got torch.float64; allowed is torch.float32",
    ),
    "alibi with gradient": (
        ValueError,
        {"alibi_slopes": normal(4).requires_grad_()},
        "alibi_slopes.requires_grad: got True; allowed is False: they have no gradient",
    ),
    "sink shape": (ValueError, {"sink": normal(2)}, "sink.shape: got (2,); allowed is (4,)"),
    "sink dtype": (
        TypeError,
        {"sink": normal(4, dtype=torch.float16)},
        "sink.dtype: got torch.float16; allowed is one of ['torch.bfloat16', 'torch.float32']",
    ),
    "fp8 unknown": (
        ValueError,
        {"fp8": "tile"},
        "fp8: got 'tile'; allowed is None or one of tensor, block, rotated",
    ),
    "fp8 a bool": (TypeError, {"fp8": True}, "fp8: got True (bool); allowed is a string or None"),
    "fp8 of fp32": (
        ValueError,
        {"fp8": "block"},
        "fp8: got 'block'; allowed is None with q of torch.float32; bf16 and fp16 can be quantised",
    ),
    "fp8 of fp8": (
        ValueError,
        {"fp8": "block", **fp8()},
        "fp8: got 'block'; allowed is None with q, k and v that are fp8 already",
    ),
    "a scale of fp32": (
        ValueError,
        {"k_descale": normal(2, 2)},
        "k_descale: got a tensor of shape (2, 2); allowed is None with q of torch.float32: "
        "only fp8 tensors have scales",
    ),
    "scale of each query head": (
        ValueError,
        {"q_descale": normal(2, 4), **fp8()},
        "q_descale.shape: got (2, 4); allowed is (2, 2)",
    ),
    "scale dtype": (
        TypeError,
        {"v_descale": normal(2, 2, dtype=torch.float16), **fp8()},
        "v_descale.dtype: got torch.float16; allowed is torch.float32",
    ),
    "scale a number": (
        TypeError,
        {"v_descale": 1.0, **fp8()},
        "v_descale: got float; allowed is a tensor or None",
    ),
    "scale with gradient": (
        ValueError,
        {"v_descale": normal(2, 2).requires_grad_(), **fp8()},
        "v_descale.requires_grad: got True; allowed is False: it has no gradient",
    ),
    "fp8 with gradient": (
        ValueError,
        {**fp8(), "k": normal(2, 6, 2, 8).to(torch.float8_e4m3fn).requires_grad_()},
        "k.requires_grad: got True; allowed is False: fp8 tensors have no gradient; "
        "bf16 ones with fp8= have",
    ),
    "fp8 and bf16": (
        TypeError,
        {**fp8(), "v": normal(2, 6, 2, 7, dtype=torch.bfloat16)},
        "v.dtype: got torch.bfloat16; allowed is q's, torch.float8_e4m3fn",
    ),
    "bias in fp8": (
        TypeError,
        {**fp8(), "bias": normal(1, 1, 5, 6).to(torch.float8_e4m3fn)},
        "bias.dtype: got torch.float8_e4m3fn; allowed is torch.float32",
    ),
    "sink in fp8": (
        TypeError,
        {**fp8(), "sink": normal(4).to(torch.float8_e4m3fn)},
        "sink.dtype: got torch.float8_e4m3fn; allowed is one of ['torch.bfloat16', 'torch.float32']",
    ),
    "seqused dtype": (
        TypeError,
        {"seqused_k": ints(1, 2, dtype=torch.int64)},
        "seqused_k.dtype: got torch.int64; allowed is torch.int32",
    ),
    "seqused shape": (
        ValueError,
        {"seqused_q": ints(1, 2, 3)},
        "seqused_q.shape: got (3,); allowed is (2,)",
    ),
    "seqused too long": (
        ValueError,
        {"seqused_k": ints(6, 7)},
        "seqused_k[1]: got 7; allowed is 0 to 6, its sequence's length",
    ),
    "seqused negative": (
        ValueError,
        {"seqused_q": ints(-1, 5)},
        "seqused_q[0]: got -1; allowed is 0 to 5, its sequence's length",
    ),
    "q not a tensor": (TypeError, {"q": [[1.0]]}, "q: got list; allowed is a tensor"),
    "v None": (TypeError, {"v": None}, "v: got NoneType; allowed is a tensor"),
    "seed": (
        ValueError,
        {"dropout_p": 0.1, "seed": "x"},
        "seed: got 'x'; allowed is an int, (seed, offset) or an int64 tensor",
    ),
    "seed of three": (
        ValueError,
        {"dropout_p": 0.1, "seed": (1, 2, 3)},
        "seed: got (1, 2, 3); allowed is an int, (seed, offset) or an int64 tensor",
    ),
    "seed too large": (
        ValueError,
        {"dropout_p": 0.1, "seed": 2**63},
        "seed: got 9223372036854775808; allowed is an int, (seed, offset) or an int64 tensor",
    ),
    "seed tensor dtype": (
        ValueError,
        {"dropout_p": 0.1, "seed": ints(1)},
        "seed: got torch.int32 of shape (1,); allowed is int64, 1 or 2 elements",
    ),
    "seed a bool": (
        ValueError,
        {"dropout_p": 0.1, "seed": True},
        "seed: got True; allowed is an int, (seed, offset) or an int64 tensor",
    ),
    "seed of a call without dropout": (
        ValueError,
        {"seed": "x"},
        "seed: got 'x'; allowed is an int, (seed, offset) or an int64 tensor",
    ),
    "return_lse a string": (
        TypeError,
        {"return_lse": "no"},
        "return_lse: got 'no' (str); allowed is a bool",
    ),
    "scale too large for the schema": (
        ValueError,
        {"scale": 2**63},
        "scale: got 9223372036854775808; allowed is a number or None, of 64 bits",
    ),
    "a tensor for a number": (
        TypeError,
        {"scale": torch.ones(3, 3)},
        "scale: got a tensor of shape (3, 3) (Tensor); allowed is a number or None",
    ),
    "out shape": (
        ValueError,
        {"out": normal(2, 5, 4, 8)},
        "out.shape: got (2, 5, 4, 8); allowed is (2, 5, 4, 7)",
    ),
    "out dtype": (
        TypeError,
        {"out": normal(2, 5, 4, 7, dtype=torch.float16)},
        "out: got torch.float16 on cpu; allowed is q's, torch.float32 on cpu",
    ),
    "out strides": (
        ValueError,
        {"out": normal(2, 5, 7, 4).mT},
        "out.stride(-1): got 4; allowed is 1, adjacent elements",
    ),
}

BAD_VARLEN = {
    "q rank": (
        ValueError,
        {"q": normal(1, 5, 4, 8)},
        "q.shape: got (1, 5, 4, 8); allowed is rank 3, (total, heads, head_dim)",
    ),
    "only one cu_seqlens": (
        ValueError,
        {"cu_seqlens_k": None},
        "cu_seqlens_k: got None; allowed is an int32 tensor (B + 1,): varlen needs both",
    ),
    "cu_seqlens dtype": (
        TypeError,
        {"cu_seqlens_q": ints(0, 3, 5, dtype=torch.int64)},
        "cu_seqlens_q.dtype: got torch.int64; allowed is torch.int32",
    ),
    "cu_seqlens rank": (
        ValueError,
        {"cu_seqlens_q": ints(0, 3, 5)[None]},
        "cu_seqlens_q.shape: got (1, 3); allowed is (B + 1,)",
    ),
    "cu_seqlens empty": (
        ValueError,
        {"cu_seqlens_q": ints()},
        "cu_seqlens_q.shape: got (0,); allowed is (B + 1,)",
    ),
    "cu_seqlens of different batches": (
        ValueError,
        {"cu_seqlens_k": ints(0, 1, 4, 6)},
        "cu_seqlens_k.shape: got (4,); allowed is (3,)",
    ),
    "cu_seqlens not contiguous": (
        ValueError,
        {"cu_seqlens_q": ints(0, 9, 3, 9, 5, 9)[::2]},
        "cu_seqlens_q.stride(): got (2,); allowed is contiguous",
    ),
    "cu_seqlens decreasing": (
        ValueError,
        {"cu_seqlens_q": ints(0, 4, 3)},
        "cu_seqlens_q[2]: got 3; allowed is at least 4, the one before it",
    ),
    "cu_seqlens not from 0": (
        ValueError,
        {"cu_seqlens_k": ints(1, 4, 6)},
        "cu_seqlens_k[0]: got 1; allowed is 0",
    ),
    "cu_seqlens past the rows": (
        ValueError,
        {"cu_seqlens_k": ints(0, 4, 7)},
        "cu_seqlens_k[-1]: got 7; allowed is at most 6, rows of k",
    ),
    "max_seqlen None": (
        ValueError,
        {"max_seqlen_q": None},
        "max_seqlen_q: got None; allowed is a length >= 0",
    ),
    "max_seqlen negative": (
        ValueError,
        {"max_seqlen_k": -1},
        "max_seqlen_k: got -1; allowed is a length >= 0",
    ),
    "max_seqlen too small": (
        ValueError,
        {"max_seqlen_k": 3},
        "max_seqlen_k: got 3; allowed is at least the longest sequence, 4",
    ),
    "max_seqlen a float": (
        TypeError,
        {"max_seqlen_q": 3.0},
        "max_seqlen_q: got 3.0 (float); allowed is an integer or None",
    ),
    "max_seqlen a vector": (
        ValueError,
        {"max_seqlen_q": ints(3, 3)},
        "max_seqlen_q.shape: got (2,); allowed is a 0-d tensor or an int",
    ),
    "seqused longer than its sequence": (
        ValueError,
        {"seqused_k": ints(4, 3)},
        "seqused_k[1]: got 3; allowed is 0 to 2, its sequence's length",
    ),
    "bias of the total": (
        ValueError,
        {"bias": normal(1, 4, 5, 6)},
        "bias.shape: got (1, 4, 5, 6); allowed is (2|1, 4|1, 3|1, 4|1), "
        "positions local to each sequence",
    ),
    "cu_seqlens a list": (
        TypeError,
        {"cu_seqlens_q": [0, 3, 5]},
        "cu_seqlens_q: got list; allowed is a tensor or None",
    ),
    "no cu_seqlens at all, which is a dense call": (
        ValueError,
        {"cu_seqlens_q": None, "cu_seqlens_k": None, "q": normal(2, 5, 4, 8)},
        "cu_seqlens_q: got None; allowed is an int32 tensor (B + 1,): varlen needs both",
    ),
    "max_seqlen a float tensor": (
        TypeError,
        {"max_seqlen_q": torch.tensor(3.0)},
        "max_seqlen_q.dtype: got torch.float32; allowed is one of the integer types",
    ),
    "max_seqlen a NaN tensor": (
        TypeError,
        {"max_seqlen_k": torch.tensor(math.nan)},
        "max_seqlen_k.dtype: got torch.float32; allowed is one of the integer types",
    ),
    "max_seqlen a bool tensor": (
        TypeError,
        {"max_seqlen_k": torch.tensor(True)},
        "max_seqlen_k.dtype: got torch.bool; allowed is one of the integer types",
    ),
    "max_seqlen a bool": (
        TypeError,
        {"max_seqlen_k": True},
        "max_seqlen_k: got True (bool); allowed is an integer or None",
    ),
    "max_seqlen a negative tensor": (
        ValueError,
        {"max_seqlen_q": torch.tensor(-1)},
        "max_seqlen_q: got -1; allowed is a length >= 0",
    ),
    "max_seqlen too large for the schema": (
        ValueError,
        {"max_seqlen_q": 2**64},
        "max_seqlen_q: got 18446744073709551616; allowed is an integer or None, of 64 bits",
    ),
}


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize(("error", "changes", "message"), BAD_DENSE.values(), ids=list(BAD_DENSE))
def test_bad_input(error, changes, message, call):
    """explain took what attention refuses."""
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**dense(**changes))


@pytest.mark.parametrize("call", [attention_varlen, explain])
@pytest.mark.parametrize(("error", "changes", "message"), BAD_VARLEN.values(), ids=list(BAD_VARLEN))
def test_bad_input_varlen(error, changes, message, call):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**varlen(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": normal(2, 7, 2, 7)}, "v length: got 7; allowed is k's, 6"),
        ({"v": normal(2, 6, 4, 7)}, "v heads: got 4; allowed is k's, 2"),
        ({"k": normal(3, 6, 2, 8), "v": normal(3, 6, 2, 7)}, "k batch size: got 3; allowed is q's, 2"),
        ({"out": normal(2, 5, 3, 7)}, "out.shape: got (2, 3, 5, 7); allowed is (2, 4, 5, 7)"),
        ({"out": normal(2, 5, 7, 4).mT}, "out.stride(-1): got 4; allowed is 1, adjacent elements"),
    ],
)
@pytest.mark.parametrize("call", [attention, explain])
def test_messages_have_the_callers_shapes(changes, message, call):
    """With heads first they showed the shapes of a transposed tensor that nobody had passed."""
    heads_first = {name: t.transpose(1, 2) for name, t in dense(**changes).items()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**heads_first, layout="bhsd")


PLAIN = normal(2, 6, 2, 8)
ODD = {
    "sparse": (PLAIN.to_sparse(), "layout: got torch.sparse_coo; allowed is torch.strided"),
    "mkldnn": (PLAIN.to_mkldnn(), "layout: got torch._mkldnn; allowed is torch.strided"),
    "nested": (torch.nested.nested_tensor([PLAIN[0], PLAIN[1, :3]]), "got a nested tensor; allowed is"),
    "jagged": (
        torch.nested.nested_tensor([PLAIN[0], PLAIN[1, :3]], layout=torch.jagged),
        "got a nested tensor; allowed is",
    ),
    "masked": (torch.masked.masked_tensor(PLAIN, PLAIN > 0), "got a MaskedTensor; allowed is"),
}


@pytest.mark.parametrize("call", [attention, explain])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_are_not_plain_are_refused_by_name(kind, name, layout, call):
    """They came back as internal errors of torch, or explain took them."""
    given = {"q": PLAIN, "k": PLAIN, "v": PLAIN, name: ODD[kind][0]}
    with pytest.raises(TypeError, match=rf"^{name}(\.|: ){ODD[kind][1]}"):
        call(**given, layout=layout)


def test_a_plain_subclass_is_a_tensor_as_any_other():
    class Named(torch.Tensor): ...

    q = PLAIN.as_subclass(Named)
    assert torch.equal(attention(q, q, torch.nn.Parameter(PLAIN)), attention(PLAIN, PLAIN, PLAIN))


def test_messages_of_many_lengths_are_short():
    """A batch of thousands printed all of its lengths."""
    many = torch.zeros(100_001, dtype=torch.int32)
    wrong = many.index_fill(0, torch.tensor(49_999), 2)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens_q\[50000\]: got 0; allowed is at least 2"
    ) as caught:
        attention_varlen(**varlen(cu_seqlens_q=wrong, cu_seqlens_k=many))
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=r"^window: got \[0, 1, 2.*\.\.\.\]; ") as caught:
        attention(**dense(window=list(range(100_000))))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_longest_length_beyond_the_rows_costs_nothing(as_tensor):
    """Grids grew with it, up to sizes that no launch takes; the rows bound every sequence."""
    tensors = {n: t for n, t in varlen().items() if isinstance(t, torch.Tensor)}
    spec = make_spec(Inputs(**tensors), max_seqlen_q=10**12, max_seqlen_k=2**63 - 1)
    assert (spec.max_seqlen_q, spec.max_seqlen_k) == (5, 6)
    much = torch.tensor(10**12) if as_tensor else 10**12
    given = tensors | {"max_seqlen_q": much, "max_seqlen_k": much}
    same = {"max_seqlen_q": 5, "max_seqlen_k": 6}
    assert torch.equal(
        attention_varlen(**given, causal=True), attention_varlen(**given | same, causal=True)
    )


def test_a_bias_may_reach_beyond_the_rows():
    """Its shape is that of max_seqlen as given, not as cut to the rows."""
    bias = normal(2, 4, 9, 11).requires_grad_()
    given = varlen(max_seqlen_q=9, max_seqlen_k=11)
    attention_varlen(**given, bias=bias).sum().backward()
    close = bias.detach()[:, :, :5, :6].clone().requires_grad_()
    out = attention_varlen(**given | {"max_seqlen_q": 5, "max_seqlen_k": 6}, bias=close)
    out.sum().backward()
    assert torch.equal(out, attention_varlen(**given, bias=bias))
    assert torch.equal(bias.grad[:, :, :5, :6], close.grad) and not bias.grad[:, :, 5:].any()


def test_a_longest_length_that_cannot_be_read_is_the_total():
    meta = {n: t.to("meta") for n, t in varlen().items() if isinstance(t, torch.Tensor)}
    longest = torch.tensor(3, device="meta")
    found = explain(**meta, max_seqlen_q=longest, max_seqlen_k=longest)
    assert "varlen" in found.data["features"]


def test_out_is_refused_while_gradients_are_recorded():
    """Writing into a given tensor would lose the gradient without a word."""
    q = normal(2, 5, 4, 8).requires_grad_()
    with pytest.raises(ValueError, match="out: got a tensor while gradients are recorded"):
        attention(**dense(q=q, out=normal(2, 5, 4, 7)))


def test_length_values_are_checked_on_other_devices_only_when_asked(monkeypatch):
    """Reading cu_seqlens waits for a GPU. On a device whose tensors have no data, reading one fails."""
    x = Inputs(**{n: t.to("meta") for n, t in varlen().items() if isinstance(t, torch.Tensor)})
    lengths = {"max_seqlen_q": 3, "max_seqlen_k": 4}
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    spec = make_spec(x, **lengths)
    check_values(spec, x)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises((NotImplementedError, RuntimeError)):
        check_values(spec, x)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e-40, 1e38, 1e300])
def test_factors_that_leave_fp32_are_refused(name, value):
    """softcap=1e-40 made every output NaN, scale=1e39 infinite scores."""
    with pytest.raises(ValueError, match=f"^{name}: got "):
        attention(**dense(**{name: value}))


def test_length_values_are_checked_again_in_a_call_of_known_form():
    """Specs of earlier calls are kept; what the length tensors hold belongs to each call alone."""
    attention_varlen(**varlen())
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[2\]: got 3; "):
        attention_varlen(**varlen(cu_seqlens_q=ints(0, 5, 3)))


def spec_of(arguments: dict[str, Any], **options: Any) -> Any:
    return make_spec(Inputs(**arguments), **options)


def test_a_spec_says_what_was_asked():
    bias = normal(1, 4, 5, 1)
    spec = spec_of(dense(bias=bias, seqused_k=ints(3, 6)), causal=True, softcap=3.0, dropout_p=0.1)
    assert (spec.batch, spec.max_seqlen_q, spec.max_seqlen_k) == (2, 5, 6)
    assert (spec.heads_q, spec.heads_kv, spec.group, spec.head_dim, spec.head_dim_v) == (4, 2, 2, 8, 7)
    assert spec.scale == 8**-0.5
    assert spec.window == (None, 0)
    assert spec.ragged and spec.seqused and not spec.varlen
    assert spec.features == {
        *("fp32", "gqa", "unequal_dims", "causal", "softcap", "bias", "dropout", "seqused")
    }


def test_plain_attention_asks_for_no_feature():
    q = normal(1, 5, 2, 8)
    assert spec_of({"q": q, "k": q, "v": q}).features == {"fp32"}


def test_a_causal_window_needs_the_causal_feature():
    """(S - 1, 0) runs the causal path: a kernel without it must not be chosen."""
    q = normal(1, 5, 2, 8)
    x = {"q": q, "k": q, "v": q}
    assert "causal" in spec_of(x, window_left=4, window_right=0).features
    assert "window" not in spec_of(x, window_left=4, window_right=0).features
    assert "window" in spec_of(x, window_left=1).features
    assert not {"window", "causal"} & spec_of(x, window_left=4, window_right=9).features


def test_lse_is_fp32_but_for_fp64():
    for dtype in DTYPES:
        if dtype.itemsize > 1:
            q = normal(1, 5, 2, 8, dtype=dtype)
            want = torch.float64 if dtype == torch.float64 else torch.float32
            assert spec_of({"q": q, "k": q, "v": q}).lse_dtype == want


def test_a_spec_is_hashable_and_frozen():
    """Backends cache by it."""
    spec, same = (spec_of(dense(), causal=True) for _ in range(2))
    assert spec == same and hash(spec) == hash(same)
    with pytest.raises(AttributeError):
        spec.causal = False


def test_sequences_of_a_dense_batch():
    x = Inputs(**dense(seqused_q=ints(5, 0), seqused_k=ints(2, 6)))
    first, second = sequences(make_spec(x), x)
    assert (first.length_q, first.length_k, second.length_q, second.length_k) == (5, 2, 0, 6)
    assert torch.equal(first.queries(x.q), x.q[0])
    assert torch.equal(first.keys(x.k), x.k[0, :2])
    assert second.queries(x.q).shape[0] == 0
    lse = normal(2, 4, 5)
    assert torch.equal(first.rows(lse), lse[0])


def test_sequences_of_a_packed_batch():
    x = Inputs(**{n: t for n, t in varlen(seqused_k=ints(1, 2)).items() if isinstance(t, torch.Tensor)})
    first, second = sequences(make_spec(x, max_seqlen_q=3, max_seqlen_k=4), x)
    assert torch.equal(first.queries(x.q), x.q[:3]) and torch.equal(second.queries(x.q), x.q[3:5])
    assert torch.equal(first.keys(x.v), x.v[:1]) and torch.equal(second.keys(x.v), x.v[4:6])
    lse = normal(4, 5)
    assert torch.equal(second.rows(lse), lse[:, 3:5])
