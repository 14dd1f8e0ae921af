"""The simulator is shown several hundred broken kernels, one defect each, and has to notice.

A defect counts as noticed if one of 20 schedules ends with a finding or a wrong result. What is never
noticed stands in EQUIVALENT with the reason why there is nothing to notice.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from mutants import SUBJECTS
from problems_sim import TRITON
from soak import DOCS as DOCS_FILE

from tilewise.sim.mutate import KINDS, Mutation, edit, mutations

SEEDS = 20
DOCS = DOCS_FILE.read_text(encoding="utf-8")

EQUIVALENT = {
    "forward": {
        "consumer: early release: mbarrier.arrive(k_empty.index(st), count=1) before "
        "s = warpgroup_mma_wait(1, [s_t])": "The producer asks for a free V stage between two K "
        "loads, and the V of the step before is released only after the product that reads this K.",
    },
    "persistent": {
        "consumer: early release: mbarrier.arrive(k_empty.index(st), count=1) before "
        "s = warpgroup_mma_wait(1, [s_t])": "As in the forward: the release of V orders it.",
    },
    "backward": {
        "b_producer: missing wait: mbarrier.wait(do_empty.index(st), ph ^ 1)": "Q and dO are released "
        "together, after the last product that reads either, and the producer has just waited for Q.",
        "b_producer: late wait: mbarrier.wait(do_empty.index(st), ph ^ 1) after mbarrier.expect("
        "do_full.index(st), do_desc.block_type.nbytes + BM * 4)": "The same wait, which the one for Q "
        "already implies.",
        "b_consumer: early release: mbarrier.arrive(do_empty.index(st), count=1) before "
        "dk = warpgroup_mma_wait(0, [dk_t])": "dV was the last product to read dO and has been "
        "waited for; the product in flight reads Q.",
    },
    "product": {
        "finish: missing rescale: total * INF -> total in "
        "total = gl.where(dead, 1.0, gl.where(total == 0, total * INF, total))": "No problem of the "
        "suite has logits beyond 1e9 in fp16, which this is for.",
        "overlap: early release: k_ring.release(step + 1) before s = warpgroup_mma_wait(1, [s])": "As "
        "in the forward: the release of V orders it.",
    },
    "hopper_demo": {
        "consume: early release: k_ring.release(i) before s = warpgroup_mma_wait(1, [s_token])": "As in "
        "the forward: the release of V orders it.",
    },
    "blackwell_demo": {
        "softmax: swapped barriers: p_full and a_full": "The correction then waits for the barrier that "
        "says P is there, and passes it on with its own arrival, which P.full needs as well.",
        "softmax: wrong scale: (top - m) * scale_log2 -> top - m in "
        "grown = (top - m) * scale_log2 > THRESHOLD": "Another threshold: it says when the output is "
        "rescaled, and the result is the same with any.",
        "correct: missing wait: mbarrier.wait(o_full.index(w), i - 1 & 1)": "The scores that alpha was "
        "computed from came out of a later product, and products complete in order.",
    },
    "clusters": {
        "multicast_kernel: late wait: mbarrier.wait(empty, i & 1 ^ 1) after "
        "mbarrier.expect(full, x_desc.nbytes_per_cta)": "Each CTA has itself seen the phase before of "
        "its own barrier, so it may expect the next bytes at once; the copy still comes after the wait.",
    },
    "gemm": {
        "multiply: early release: b_ring.release(i) before acc = warpgroup_mma_wait(0, [token])": "The "
        "producer waits for a free stage of A before it loads B, and A is released after the product.",
    },
}

BY_HAND = {
    "product": [
        (
            "attend",
            "Q is overwritten while it is loaded into registers",
            "s, o = overlap(W, q, p, o, rings, turns, step, how, scores)\n"
            "release_q(q_ring, (q_step + turn + 1) * CONSUMERS + W, Q_IN_REGISTERS)",
            "release_q(q_ring, (q_step + turn + 1) * CONSUMERS + W, Q_IN_REGISTERS)\n"
            "s, o = overlap(W, q, p, o, rings, turns, step, how, scores)",
        ),
        (
            "consume",
            "the second attempt begins at step 0",
            "attend(W, shared, count, count, step, how, False)",
            "attend(W, shared, count, count, none, how, False)",
        ),
        (
            "consume",
            "the second attempt reads the first Q again",
            "attend(W, shared, count, count, step, how, False)",
            "attend(W, shared, count, none, step, how, False)",
        ),
        (
            "consume",
            "lost rows are not counted",
            "ballot.slice(W * ROWS, ROWS).store(lost_rows)",
            "pass",
        ),
        (
            "consume",
            "lost rows are announced before they are there",
            "ballot.slice(W * ROWS, ROWS).store(lost_rows)\nmbarrier.arrive(done, count=1)",
            "mbarrier.arrive(done, count=1)\nballot.slice(W * ROWS, ROWS).store(lost_rows)",
        ),
        (
            "consume",
            "consumers share one row of the ballot",
            "ballot.slice(W * ROWS, ROWS).store(lost_rows)",
            "ballot.slice(0, ROWS).store(lost_rows)",
        ),
        (
            "produce",
            "nothing is loaded again",
            "load_tiles(inputs, rings, problem, count, count, step, CONSUMERS, RAGGED)",
            "pass",
        ),
        (
            "produce",
            "Q of the second attempt is counted from 0",
            "load_tiles(inputs, rings, problem, count, count, step, CONSUMERS, RAGGED)",
            "load_tiles(inputs, rings, problem, count, none, step, CONSUMERS, RAGGED)",
        ),
        ("finish", "no row is ever lost", "return lost.to(gl.int32)", "return lost.to(gl.int32) * 0"),
        (
            "load_tiles",
            "K is loaded where V should be",
            "load_parts(v_ring, step, v_desc, k_at, RAGGED)",
            "load_parts(v_ring, step, k_desc, k_at, RAGGED)",
        ),
        (
            "load_tiles",
            "Q of consumer 0 for all",
            "q_at = (b, head, start_q, q_start + w * ROWS), (seqlen_q, lengths[4])",
            "q_at = (b, head, start_q, q_start), (seqlen_q, lengths[4])",
        ),
        (
            "load_parts",
            "a tile is loaded over what is still read",
            "ring.acquire(step, desc.block_type.nbytes * ring.parts)",
            "mbarrier.expect(ring.full.index(step % ring.stages), desc.block_type.nbytes * ring.parts)",
        ),
    ],
    "clusters": [
        (
            "work",
            "an answer is overwritten while it is loaded",
            "more = answer.is_canceled()\n"
            "if more:\n"
            "    tile = answer.program_id(0) + gl.num_programs(0) * answer.program_id(1)\n"
            "mbarrier.arrive(empty.index(i % 2), count=1)",
            "mbarrier.arrive(empty.index(i % 2), count=1)\n"
            "more = answer.is_canceled()\n"
            "if more:\n"
            "    tile = answer.program_id(0) + gl.num_programs(0) * answer.program_id(1)",
        ),
    ],
    "forward": [
        (
            "consumer",
            "P is read while the product holds it",
            "s = warpgroup_mma_wait(1, [s_t])",
            "l = gl.maximum(l, gl.sum(pb.to(gl.float32), axis=1))\ns = warpgroup_mma_wait(1, [s_t])",
        ),
        (
            "consumer",
            "O is rescaled while the product adds to it",
            "o, pb = warpgroup_mma_wait(0, [o_t, pn])",
            "o = o * 1.0\no, pb = warpgroup_mma_wait(0, [o_t, pn])",
        ),
        (
            "consumer",
            "V is released before O has been waited for",
            "s = warpgroup_mma_wait(1, [s_t])\nmbarrier.arrive(k_empty.index(st), count=1)",
            "mbarrier.arrive(v_empty.index(pst), count=1)\ns = warpgroup_mma_wait(1, [s_t])\n"
            "mbarrier.arrive(k_empty.index(st), count=1)",
        ),
        (
            "producer",
            "the stage changes phase one tile early",
            "ph = (i // STAGES) & 1",
            "ph = ((i + 1) // STAGES) & 1",
        ),
        (
            "producer",
            "V is loaded from K",
            "tma_load(v_desc, [kv_off + n * BLOCK_N, 0], v_full.index(st), v_s.index(st))",
            "tma_load(k_desc, [kv_off + n * BLOCK_N, 0], v_full.index(st), v_s.index(st))",
        ),
        ("consumer", "the row maximum is not carried on", "m = m_new", "pass"),
    ],
    "blackwell_demo": [
        (
            "multiply",
            "S is computed before P has been read",
            "tcgen05_mma(p, v, o_t.index(w), use_acc=i > 0, mbarriers=[o_full.index(w)])\n"
            "done = [s_full.index(w)]\n"
            "tcgen05_mma(q_s.index(w), k.permute((1, 0)), s_t.index(w), use_acc=False, mbarriers=done)",
            "done = [s_full.index(w)]\n"
            "tcgen05_mma(q_s.index(w), k.permute((1, 0)), s_t.index(w), use_acc=False, mbarriers=done)\n"
            "tcgen05_mma(p, v, o_t.index(w), use_acc=i > 0, mbarriers=[o_full.index(w)])",
        ),
        (
            "softmax",
            "P is announced before it is there",
            "weights(s_t.index(W), DTYPE).store(gl.convert_layout(p.to(DTYPE), p_layout))\n"
            "mbarrier.arrive(p_full.index(W), count=1)",
            "mbarrier.arrive(p_full.index(W), count=1)\n"
            "weights(s_t.index(W), DTYPE).store(gl.convert_layout(p.to(DTYPE), p_layout))",
        ),
        (
            "correct",
            "a growing row is not rescaled",
            "part.store(part.load(layout) * alpha[:, None])",
            "part.store(part.load(layout))",
        ),
    ],
    "backward": [
        (
            "b_consumer",
            "lse is read before it has arrived",
            "mbarrier.wait(q_full.index(st), ph)",
            "lse = l_s.index(st).load(col_l)\nmbarrier.wait(q_full.index(st), ph)",
        ),
        (
            "b_consumer",
            "dQ is stored before its buffer is free",
            "dq_s.store(t)\nfence_async_shared()",
            "dq_s.store(t)\nmbarrier.arrive(dq_full, count=1)\nfence_async_shared()",
        ),
        (
            "b_writer",
            "dQ is given back before it has been read",
            "tma_store_wait(0)\nmbarrier.arrive(dq_empty, count=1)",
            "mbarrier.arrive(dq_empty, count=1)\ntma_store_wait(0)",
        ),
        (
            "b_consumer",
            "dS lacks delta",
            "ds = (p * (dp - delta[None, :])).to(DT)",
            "ds = (p * dp).to(DT)",
        ),
    ],
}


def _all() -> dict[str, list[Mutation]]:
    """Mutations by kernel and function, as one test each."""
    groups = defaultdict(list)
    for name, subject in SUBJECTS.items():
        by_hand = [edit(subject.module, *parts) for parts in BY_HAND.get(name, [])]
        for mutation in mutations(subject.module) + by_hand:
            groups[f"{name}.{mutation.function}"].append(mutation)
    return dict(groups)


ALL = _all()


@pytest.mark.parametrize("group", ALL)
def test_what_survives_is_equivalent(group: str) -> None:
    name, function = group.split(".")
    survivors = [m.name for m in ALL[group] if SUBJECTS[name].survives(m, SEEDS)]
    explained = [m for m in EQUIVALENT.get(name, {}) if m.startswith(f"{function}: ")]
    assert sorted(survivors) == sorted(explained)


@pytest.mark.parametrize("name", SUBJECTS)
def test_right_kernels_raise_no_alarm(name: str, sim_seeds: range) -> None:
    subject = SUBJECTS[name]
    for seed in sim_seeds:
        assert subject.notices(subject.module, seed) == "", f"seed {seed}"


def test_the_suite_is_large_and_varied() -> None:
    every = [m for group in ALL.values() for m in group]
    assert len(every) >= 300
    assert {m.kind for m in every} == set(KINDS)
    unnoticed = sum(len(EQUIVALENT.get(name, {})) for name in SUBJECTS)
    assert unnoticed <= 0.05 * len(every), "at least 95 % must be noticed"
    if TRITON >= (3, 9):  # which has the most kernels
        assert f"Of {len(every)} mutations {unnoticed} are not" in " ".join(DOCS.split())
