"""The gradient of an additive bias, by a kernel of its own that is parallel over the bias.

Whatever the bias is broadcast over is summed in an order that is always the same, and memory grows with
the bias alone. Scores are computed once more, which takes two products of a backward's five.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import schedule
from tilewise.backends.triton.launch import launch_planned, plan_launch
from tilewise.backends.triton.scores import load_lse, score_gradients
from tilewise.backends.triton.terms import term_arguments
from tilewise.backends.triton.tile import (
    key_span,
    key_tile_runs,
    load_rows,
    load_tile,
    matrix,
    sequence_rows,
)
from tilewise.spec import AttentionSpec, Inputs


@triton.jit
def bias_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    rest_ptr,
    strides,  # of q, k, v, dout, lse, delta, rest
    lengths,
    terms,
    dbias_ptr,
    shape,  # of the bias: batch entries, heads, and the strides of dbias, a dimension of chunks first
    sharing,  # heads that share one of the bias
    chunks,  # programs for a tile, members of each, members in all
    heads,
    group,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IEEE: tl.constexpr,
    NATURAL: tl.constexpr,
    OVER_QUERIES: tl.constexpr,
    OVER_KEYS: tl.constexpr,
):
    """The gradient of one tile of the bias, summed over batch entries and heads that share it. Of a tile
    that queries or keys share, its sum over them: those of all tiles are added up elsewhere."""
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides, rest_strides = strides
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    entries, bias_heads, steps = shape
    tiles_q, tiles_k = tl.cdiv(max_q, TILE_Q), tl.cdiv(max_k, TILE_K)
    pid = tl.program_id(0)
    k_tile = pid % tiles_k
    q_tile = pid // tiles_k % tiles_q
    bias_head = pid // tiles_k // tiles_q % bias_heads
    entry = pid // tiles_k // tiles_q // bias_heads % entries
    chunk = pid // tiles_k // tiles_q // bias_heads // entries
    q_start, k_start = q_tile * TILE_Q, k_tile * TILE_K
    acc = tl.zeros([TILE_Q, TILE_K], tl.float32)
    for n in range(chunk * chunks[1], min((chunk + 1) * chunks[1], chunks[2])):
        b = entry + n // sharing
        head = bias_head + n % sharing
        start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
        start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
        first, _full_first, _full_stop, stop = key_tile_runs(
            q_start, q_start + TILE_Q, seqlen_q, seqlen_k, left, right, TILE_K, True
        )
        if (q_start < seqlen_q) & (k_tile >= first) & (k_tile < stop):
            q_low, q_high = key_span(seqlen_k, seqlen_q, right, left)
            low, high = key_span(seqlen_q, seqlen_k, left, right)
            q_base = matrix(q_ptr, q_strides, b, start_q, head)
            dout_base = matrix(dout_ptr, dout_strides, b, start_q, head)
            lse_base = matrix(lse_ptr, lse_strides, b, start_q, head)
            delta_base = matrix(delta_ptr, delta_strides, b, start_q, head)
            k_base = matrix(k_ptr, k_strides, b, start_k, head // group)
            v_base = matrix(v_ptr, v_strides, b, start_k, head // group)
            q = load_tile(q_base, q_strides[1], q_start, q_low, q_high, TILE_Q, BLOCK_D, D, True)
            dout = load_tile(
                dout_base, dout_strides[1], q_start, q_low, q_high, TILE_Q, BLOCK_DV, DV, True
            )
            k = load_tile(k_base, k_strides[1], k_start, low, high, TILE_K, BLOCK_D, D, True)
            v = load_tile(v_base, v_strides[1], k_start, low, high, TILE_K, BLOCK_DV, DV, True)
            lse, rest = load_lse(
                lse_base, rest_ptr, rest_strides, b, start_q, head, q_start, q_low, q_high,
                TILE_Q, True, NATURAL,
            )  # fmt: skip
            delta = load_rows(delta_base, q_start, q_low, q_high, 0.0, TILE_Q, True)
            operands = (q, dout, lse, rest, delta, k, v)
            ds, _capped = score_gradients(
                operands, q_start, k_start, b, head, (seqlen_q, seqlen_k), terms, left, right,
                scale, softcap, TILE_Q, TILE_K, IEEE, NATURAL, True,
            )  # fmt: skip
            acc += ds

    i = q_start + tl.arange(0, TILE_Q)
    j = k_start + tl.arange(0, TILE_K)
    chunk_step, batch_step, head_step, row_step, key_step = steps
    base = dbias_ptr + tl.cast(chunk, tl.int64) * chunk_step
    base += tl.cast(entry, tl.int64) * batch_step + tl.cast(bias_head, tl.int64) * head_step
    rows, keys = i.to(tl.int64) * row_step, j.to(tl.int64) * key_step
    element = dbias_ptr.dtype.element_ty
    if OVER_QUERIES and OVER_KEYS:
        at = tl.cast(q_tile, tl.int64) * row_step + tl.cast(k_tile, tl.int64) * key_step
        tl.store(base + at, tl.sum(acc).to(element))
    elif OVER_QUERIES:
        at = tl.cast(q_tile, tl.int64) * row_step + keys
        tl.store(base + at, tl.sum(acc, 0).to(element), mask=j < max_k)
    elif OVER_KEYS:
        at = rows + tl.cast(k_tile, tl.int64) * key_step
        tl.store(base + at, tl.sum(acc, 1).to(element), mask=i < max_q)
    else:
        inside = (i < max_q)[:, None] & (j < max_k)[None, :]
        tl.store(base + rows[:, None] + keys[None, :], acc.to(element), mask=inside)


def fill_bias_gradient(
    spec: AttentionSpec, x: Inputs, read: tuple[Tensor | None, ...], dbias: Tensor
) -> None:
    """Fill dbias, (B|1, Hq|1, Sq|1, Sk|1). read: q, k, v, dout, lse, delta, and rest of the backward."""
    plan = plan_launch("fa2_dq", spec, "queries")
    entries, heads = dbias.shape[:2]
    tiles_q = triton.cdiv(spec.max_seqlen_q, plan.arguments["TILE_Q"])
    tiles_k = triton.cdiv(spec.max_seqlen_k, plan.arguments["TILE_K"])
    tiles = entries * heads * tiles_q * tiles_k
    sharing = spec.batch * spec.heads_q // (entries * heads) if tiles else 0
    if sharing == 0:
        return  # 0, as it has been made
    over_queries = dbias.shape[2] < spec.max_seqlen_q
    over_keys = dbias.shape[3] < spec.max_seqlen_k
    rows = tiles_q if over_queries else spec.max_seqlen_q
    keys = tiles_k if over_keys else spec.max_seqlen_k
    # So few tiles that most of a GPU would idle are added up by several programs each.
    chunks = min(sharing, max(1, 2 * schedule.multiprocessors(spec.device) // tiles))
    # A bias may be made for longer sequences than there are.
    target = dbias[:, :, : 1 if over_queries else rows, : 1 if over_keys else keys]
    whole = chunks == 1 and not over_queries and not over_keys
    parts = (chunks, entries, heads, rows, keys)
    sums = target[None] if whole else dbias.new_empty(parts, dtype=torch.float32)
    extra = term_arguments(spec, x) | {
        "dbias_ptr": sums,
        "shape": (entries, heads, sums.stride()),
        "sharing": spec.heads_q // heads,
        "chunks": (chunks, triton.cdiv(sharing, chunks), sharing),
        "OVER_QUERIES": over_queries,
        "OVER_KEYS": over_keys,
    }
    plan = plan._replace(programs=chunks * tiles)
    launch_planned(bias_gradient_kernel, plan, spec, x, read, extra)
    if not whole:
        over = [0, *(d for d, one in ((3, over_queries), (4, over_keys)) if one)]
        target.copy_(sums.sum(dim=over, keepdim=True)[0])
