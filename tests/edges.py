"""What others got wrong: small problems, each named after a bug that some attention kernel has had.

Small enough for any backend. A problem that needs a feature which a kernel lacks is not that kernel's.
In all of them, whatever has no effect (rows of no sequence, keys that no query sees) is NaN or inf.
"""

from __future__ import annotations

from typing import Any

from problems import Problem

_GQA = {"heads_kv": 2, "group": 3}
_PACKED = {"varlen": True, "causal": True, "heads_kv": 2, "group": 2}

EDGES = {
    "one row, one key: dS is exactly 0": Problem(lengths=((1, 1),), values=3.0),
    "one row: tiles are nearly empty": Problem(lengths=((1, 37),), values=3.0, **_GQA),
    "one key: P is 1 everywhere": Problem(lengths=((37, 1),), values=3.0, **_GQA),
    "two rows, many keys": Problem(lengths=((2, 65),), values=3.0, head_dim=24),
    "one component per head": Problem(lengths=((7, 9),), head_dim=1, head_dim_v=1),
    "values three times as large": Problem(lengths=((33, 33),), causal=True, values=3.0),
    "wide keys, narrow values": Problem(lengths=((19, 21),), head_dim=40, head_dim_v=3, **_GQA),
    "narrow keys, wide values": Problem(lengths=((19, 21),), head_dim=3, head_dim_v=40, causal=True),
    "scores near 1000: exp overflows without the maximum": Problem(
        lengths=((20, 35),), shift=1000.0, causal=True
    ),
    "scores near -1000: exp of the sum underflows": Problem(
        lengths=((20, 35),), shift=-1000.0, causal=True
    ),
    "scores near -1000, last keys alone in a tile: exp(-lse) of padding is inf": Problem(
        lengths=((140, 37),), shift=-1000.0
    ),
    "scores near 1000, last keys alone in a tile": Problem(lengths=((140, 37),), shift=1000.0),
    "scores near -1000, last queries alone in a tile": Problem(lengths=((37, 140),), shift=-1000.0),
    "all scores of a row equal": Problem(lengths=((18, 40),), equal_keys=True, causal=True),
    "a scale that is not 1 / sqrt(D)": Problem(lengths=((18, 40),), scale=0.7, causal=True),
    "causal, one query: it sees every key": Problem(lengths=((1, 5),), causal=True),
    "causal, two queries, five keys: bottom-right, not top-left": Problem(
        lengths=((2, 5),), causal=True
    ),
    "causal, more queries than keys: the first rows see nothing": Problem(
        lengths=((40, 7),), causal=True, **_GQA
    ),
    "causal, one key": Problem(lengths=((20, 1),), causal=True),
    "window (0, 0): the diagonal alone": Problem(lengths=((33, 33),), window=(0, 0)),
    "window (0, 0), more keys": Problem(lengths=((20, 37),), window=(0, 0)),
    "window (0, None)": Problem(lengths=((33, 40),), window=(0, None)),
    "window (None, 0)": Problem(lengths=((33, 40),), window=(None, 0)),
    "window (S - 1, 0): causal by another name": Problem(lengths=((33, 33),), window=(32, 0)),
    "window (S, S): no window": Problem(lengths=((33, 33),), window=(33, 33)),
    "window wider than the keys, 2**31 - 1": Problem(lengths=((20, 33),), window=(2**31 - 1, 2**31 - 1)),
    "window inside one tile": Problem(lengths=((70, 70),), window=(2, 1), **_GQA),
    "window with causal": Problem(lengths=((50, 70),), causal=True, window=(9, 5)),
    "negative left: keys behind the query are out": Problem(lengths=((40, 40),), window=(-3, None)),
    "negative right: the first rows see nothing": Problem(lengths=((40, 40),), window=(None, -3)),
    "negative both, a band off the diagonal": Problem(lengths=((40, 50),), window=(-2, 9), **_GQA),
    "empty window: no row sees a key": Problem(lengths=((20, 30),), window=(-5, 3)),
    "window past the last key": Problem(lengths=((20, 30),), window=(-40, None)),
    "window before the first key": Problem(lengths=((20, 30),), window=(None, -40)),
    "window, more queries than keys": Problem(lengths=((50, 20),), window=(6, 4)),
    "no keys": Problem(lengths=((5, 0),) * 2, **_GQA),
    "no queries": Problem(lengths=((0, 5),) * 2, **_GQA),
    "no rows at all": Problem(lengths=((0, 0),)),
    "no sequences": Problem(lengths=()),
    "multi-query: all heads share one key head": Problem(lengths=((20, 24),), group=8, causal=True),
    "gqa 3": Problem(lengths=((20, 24),), heads_kv=2, group=3),
    "gqa 4, decoding": Problem(lengths=((1, 65),) * 2, heads_kv=2, group=4, causal=True),
    "expanded keys: strides 0": Problem(lengths=((20, 24),) * 2, layout="expanded keys", **_GQA),
    "a slice of a packed buffer": Problem(lengths=((20, 24),) * 2, layout="sliced", head_dim=17, **_GQA),
    "storage offset of one element": Problem(lengths=((20, 24),) * 2, layout="offset", **_GQA),
    "heads before length in memory": Problem(
        lengths=((20, 24),) * 2, layout="heads first", dout_layout="heads first", **_GQA
    ),
    "last dimension not contiguous": Problem(
        lengths=((20, 24),) * 2, layout="columns", dout_layout="columns", **_GQA
    ),
    "grad_out with strides 0, as from sum()": Problem(
        lengths=((20, 24),) * 2, dout_layout="expanded", loss="out", **_GQA
    ),
    "a loss of the log-sum-exp alone": Problem(lengths=((20, 24),), loss="lse", causal=True, **_GQA),
    "a loss of the output alone": Problem(lengths=((20, 24),), loss="out", causal=True, **_GQA),
    "deterministic": Problem(lengths=((40, 50),) * 2, deterministic=True, causal=True, **_GQA),
    "varlen": Problem(lengths=((7, 9), (33, 40), (1, 17)), **_PACKED),
    "varlen, empty sequences at the ends": Problem(
        lengths=((0, 0), (9, 12), (20, 3), (0, 0)), **_PACKED
    ),
    "varlen, empty sequences in the middle": Problem(
        lengths=((9, 9), (0, 0), (0, 5), (5, 0), (9, 9)), **_PACKED
    ),
    "varlen, every sequence empty": Problem(lengths=((0, 0),) * 3, **_PACKED),
    "varlen, every sequence empty, rows left over": Problem(
        lengths=((0, 0),) * 3, tail=(4, 4), **_PACKED
    ),
    "varlen, no sequences, rows left over": Problem(lengths=(), tail=(4, 4), **_PACKED),
    "varlen, no keys anywhere": Problem(lengths=((5, 0), (3, 0)), **_PACKED),
    "varlen, longest query 1: decoding with empty ones": Problem(
        lengths=((1, 40), (0, 7), (1, 0), (1, 1)), **_PACKED
    ),
    "varlen, rows past the last sequence": Problem(lengths=((9, 12), (20, 3)), tail=(5, 7), **_PACKED),
    "varlen, max_seqlen larger than any sequence": Problem(
        lengths=((9, 12), (20, 3)), slack=100, **_PACKED
    ),
    "varlen, window": Problem(
        lengths=((9, 40), (40, 9), (3, 3)), varlen=True, window=(4, 2), heads_kv=2, group=2
    ),
    "varlen, used lengths": Problem(
        lengths=((9, 40), (20, 9), (3, 3)), used_q=(5, 0, 3), used_k=(33, 9, 0), **_PACKED
    ),
    "used lengths of keys, as in a cache": Problem(
        lengths=((3, 40),) * 4, used_k=(40, 7, 1, 0), causal=True, **_GQA
    ),
    "used lengths of queries": Problem(lengths=((20, 24),) * 3, used_q=(20, 0, 3), causal=True, **_GQA),
    "used lengths: the mask aligns to them": Problem(
        lengths=((20, 24),) * 3, used_q=(20, 9, 3), used_k=(10, 0, 24), window=(5, 1), **_GQA
    ),
    "softcap": Problem(lengths=((20, 40),), softcap=5.0, causal=True, values=2.0, **_GQA),
    "softcap far beyond the scores": Problem(lengths=((20, 40),), softcap=50.0, **_GQA),
    "softcap saturated": Problem(lengths=((20, 40),), softcap=0.5, values=3.0, causal=True),
    "softcap, rows without keys": Problem(lengths=((40, 20),), softcap=5.0, causal=True),
    "bias": Problem(lengths=((20, 40),) * 2, bias=(True,) * 4, causal=True, **_GQA),
    "bias in the input dtype": Problem(
        lengths=((20, 40),) * 2, bias=(True,) * 4, bias_dtype="input", **_GQA
    ),
    "bias for all heads": Problem(lengths=((20, 40),) * 2, bias=(True, False, True, True), **_GQA),
    "bias for all sequences": Problem(lengths=((20, 40),) * 2, bias=(False, True, True, True), **_GQA),
    "bias of keys": Problem(lengths=((20, 40),) * 2, bias=(True, False, False, True), **_GQA),
    "bias of queries": Problem(lengths=((20, 40),) * 2, bias=(False, True, True, False), **_GQA),
    "bias, one number": Problem(lengths=((20, 40),) * 2, bias=(False,) * 4, **_GQA),
    "bias with -inf: some rows see nothing": Problem(
        lengths=((30, 2),) * 2, bias=(True,) * 4, bias_holes=True, **_GQA
    ),
    "bias of queries with -inf: whole rows see nothing": Problem(
        lengths=((30, 20),), bias=(True, True, True, False), bias_holes=True, **_GQA
    ),
    "bias, used lengths": Problem(
        lengths=((20, 24),) * 3, used_q=(20, 0, 3), used_k=(10, 9, 24), bias=(True,) * 4, **_GQA
    ),
    "bias, varlen: positions local to a sequence": Problem(
        lengths=((9, 40), (20, 9), (0, 3)), bias=(True,) * 4, slack=2, **_PACKED
    ),
    "alibi": Problem(lengths=((20, 40),), alibi="heads", **_GQA),
    "alibi for each sequence, more queries than keys": Problem(
        lengths=((40, 20),) * 2, alibi="batch", causal=True, **_GQA
    ),
    "alibi, varlen": Problem(lengths=((9, 40), (20, 9), (0, 3)), alibi="batch", **_PACKED),
    "sink": Problem(lengths=((20, 40),) * 2, sink="fp32", causal=True, **_GQA),
    "sink, rows without keys: lse is the sink": Problem(
        lengths=((40, 7),), sink="fp32", causal=True, **_GQA
    ),
    "sink, no keys at all": Problem(lengths=((5, 0),), sink="fp32", **_GQA),
    "sink in bf16": Problem(lengths=((20, 40),), sink="bf16", **_GQA),
    "sink -inf: none": Problem(lengths=((20, 7),), sink="fp32", sink_off=True, causal=True, **_GQA),
    "sink, varlen": Problem(lengths=((9, 40), (20, 9), (0, 3)), sink="fp32", tail=(2, 2), **_PACKED),
    "dropout": Problem(lengths=((20, 70),) * 2, dropout_p=0.3, causal=True, **_GQA),
    "dropout of nearly everything": Problem(lengths=((20, 70),), dropout_p=0.99, **_GQA),
    "dropout, varlen: positions local to a sequence": Problem(
        lengths=((9, 40), (20, 9), (0, 3)), dropout_p=0.5, **_PACKED
    ),
    "everything at once": Problem(
        lengths=((9, 40), (20, 9), (0, 3)),
        used_q=(9, 3, 0),
        used_k=(33, 9, 2),
        tail=(2, 3),
        window=(30, 3),
        softcap=20.0,
        bias=(True,) * 4,
        alibi="batch",
        sink="fp32",
        dropout_p=0.2,
        deterministic=True,
        head_dim_v=24,
        **{**_PACKED, "causal": False},
    ),
}

# Each feature of dispatch.FEATURES with as little else as can be.
ALONE = {
    "fp16": Problem(dtype="fp16"),
    "bf16": Problem(dtype="bf16"),
    "fp32": Problem(),
    "fp64": Problem(dtype="fp64"),
    "gqa": Problem(group=2),
    "unequal_dims": Problem(head_dim_v=8),
    "causal": Problem(causal=True),
    "window": Problem(window=(2, 1)),
    "varlen": Problem(varlen=True, lengths=((3, 5), (4, 2))),
    "seqused": Problem(used_q=(3,), used_k=(4,)),
    "softcap": Problem(softcap=5.0),
    "bias": Problem(bias=(True,) * 4),
    "alibi": Problem(alibi="heads"),
    "sink": Problem(sink="fp32"),
    "dropout": Problem(dropout_p=0.5),
    "lse_grad": Problem(loss="lse"),
    "deterministic": Problem(deterministic=True),
}

# What makes other loops of a kernel, as arguments of Problem.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "window that leaves keys and queries out": {"window": (20, -40)},
    "softcap": {"softcap": 5.0, "causal": True},
}
