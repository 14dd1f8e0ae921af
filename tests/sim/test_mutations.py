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

from tilewise.sim.mutate import KINDS, Mutation

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
        "take_turn: missing wait: mbarrier.wait(turns.index(W), step & 1)": "Turns are for speed: who "
        "takes none computes the same, and of what nobody waits for nobody misses a phase.",
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

# Of next_keys in the product: weights of a key tile, while the product of those before is under way.
_SOFTMAX = """
if kind[0]:
    p_next = anchored_powers(s, factor, top, n, at, terms)
    total = total + row_sums(p_next)
    p_next = dropped(p_next, dropout, at[4], place, terms)
    p_next = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
    o, p = warpgroup_mma_wait(0, [o, p_next])
else:
    p_next, top, shrink = softmax_step(s, factor, top, kind[1])
    total = total * spread(shrink, total) + row_sums(p_next)
    p_next = dropped(p_next, dropout, at[4], place, terms)
    p_next = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
    o, p = warpgroup_mma_wait(0, [o, p_next])
    o = o * spread(shrink, o)
"""

# Of attend in the product: the key tiles that come last.
_LEFT_EDGE = """
if left is not None:
    for _ in range(n - mine[0]):
        n -= 1
        state = (p, o, top, total)
        p, o, top, total = next_keys(W, q, state, n, at, shared, step, how, kind, True)
        step += 1
"""

# Of attend in the product: on to the next query tile.
_NEXT = """
done, done_part, done_keys = (tile, part, (runs[0] * TILE_K, runs[3] * TILE_K))
tile, runs, part = next_tile(queue, ticket + turn, 4)
""".strip()

_STORE = "lost_rows += store(W, (out, lse, rest, doubt), rows, done, results, problem, terms, how)"

_FIRST_SCORES = """
s = start_scores(q, q_ring, k_ring, step, scores, Q_IN_REGISTERS)
lost_rows += store(W, (out, lse, rest, doubt), rows, done, results, problem, terms, how)
n = mine[3] - 1
i = tile[2] + rows
at = (keys, i, tile, load_slope(tile[1], tile[8], terms), dropout_key)
bias = load_bias_of(W, n, at, problem, terms, how, False)
place = corner(W, n, at, problem)
dropout = words_of_rows(scores, ROWS, TILE_K, dropout_key, place, terms)
s = warpgroup_mma_wait(0, [s])
k_ring.release(step)
""".strip()

BY_HAND = {
    "product": [
        (
            "attend",
            "Q is overwritten while it is loaded into registers",
            f"{_FIRST_SCORES}\nrelease_q(q_ring, number, Q_IN_REGISTERS)",
            f"release_q(q_ring, number, Q_IN_REGISTERS)\n{_FIRST_SCORES}",
        ),
        (
            "attend",
            "Q in shared memory is released before the last scores are there",
            f"{_LEFT_EDGE}\nrelease_q(q_ring, number, not Q_IN_REGISTERS)",
            f"release_q(q_ring, number, not Q_IN_REGISTERS)\n{_LEFT_EDGE}",
        ),
        (
            "attend",
            "the output of a query tile goes where that of the next belongs",
            "lost_rows += store(W, (out, lse, rest, doubt), rows, done, results, problem, terms, how)\n"
            "n = mine[3] - 1",
            "lost_rows += store(W, (out, lse, rest, doubt), rows, tile, results, problem, terms, how)\n"
            "n = mine[3] - 1",
        ),
        (
            "attend",
            "the last output is not stored",
            f"if turn > 0:\n    {_STORE}",
            "pass",
        ),
        (
            "attend",
            "all consumers take the key tiles of the first one's rows",
            "mine = runs_of_rows(runs, W * ROWS, tile, problem, ROWS, TILE_K)",
            "mine = runs_of_rows(runs, 0, tile, problem, ROWS, TILE_K)",
        ),
        (
            "attend",
            "later key tiles are not passed by",
            "step = pass_by(W, runs[3] - mine[3], rings, turns, step, how)",
            "pass",
        ),
        (
            "attend",
            "earlier key tiles are not passed by",
            "step = pass_by(W, passed, rings, turns, step + 1, how)",
            "step += 1",
        ),
        (
            "attend",
            "earlier key tiles are counted from the next query tile's",
            f"passed = mine[0] - runs[0]\n{_NEXT}",
            f"{_NEXT}\npassed = mine[0] - runs[0]",
        ),
        (
            "attend",
            "the first key tile is masked only where the right edge is",
            "hidden = (n < mine[1]) | (n >= mine[2])",
            "hidden = n >= mine[2]",
        ),
        (
            "pass_by",
            "turns are passed on before they come",
            "take_turn(W, turns, step, how)\npass_turn(W, turns, how)",
            "pass_turn(W, turns, how)",
        ),
        (
            "pass_by",
            "no turn is taken for what is left out",
            "take_turn(W, turns, step, how)\npass_turn(W, turns, how)",
            "pass",
        ),
        (
            "next_keys",
            "V is released before O has been waited for",
            f"{_SOFTMAX}\nrings[2].release(step)",
            f"rings[2].release(step)\n{_SOFTMAX}",
        ),
        (
            "consume",
            "the second attempt begins at step 0",
            "attend(W, shared, start, how, False)",
            "attend(W, shared, (start[0], none, start[2]), how, False)",
        ),
        (
            "consume",
            "the second attempt reads the first Q again",
            "attend(W, shared, start, how, False)",
            "attend(W, shared, (none, start[1], start[2]), how, False)",
        ),
        (
            "consume",
            "the second attempt reads the queue from its start",
            "attend(W, shared, start, how, False)",
            "attend(W, shared, (start[0], start[1], none), how, False)",
        ),
        (
            "consume",
            "the first output may arrive after the second",
            "tma_store_wait_written()",
            "tma_store_wait(0)",
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
            "load_tiles(inputs, rings, queue, problem, start, how)",
            "pass",
        ),
        (
            "produce",
            "Q of the second attempt is counted from 0",
            "load_tiles(inputs, rings, queue, problem, start, how)",
            "load_tiles(inputs, rings, queue, problem, (none, start[1], start[2]), how)",
        ),
        (
            "deal",
            "nothing is dealt again",
            "deal_tiles(queue, problem, ticket, how, TILE_K, True)",
            "pass",
        ),
        (
            "deal",
            "the second attempt claims query tiles of its own",
            "deal_tiles(queue, problem, ticket, how, TILE_K, True)",
            "deal_tiles(queue, problem, ticket, how, TILE_K, False)",
        ),
        (
            "deal",
            "the second attempt's tickets are counted from 0",
            "deal_tiles(queue, problem, ticket, how, TILE_K, True)",
            "deal_tiles(queue, problem, ticket * 0, how, TILE_K, True)",
        ),
        (
            "deal_tiles",
            "a query tile is told of before the one before has been read",
            "queue.acquire(ticket + turn)",
            "pass",
        ),
        (
            "deal_tiles",
            "others are not told that no query tile is left",
            "stop = gl.where(more, runs[3], 0)",
            "stop = runs[3]",
        ),
        (
            "deal_tiles",
            "a part is dealt as a whole query tile",
            "runs = part_of_runs(runs, runs[0] + first, runs[0] + stop)",
            "pass",
        ),
        (
            "store_part",
            "a part is stored as a whole query tile as well",
            "left = q_start * 0 + NOWHERE",
            "pass",
        ),
        (
            "store_part",
            "no row of a part is ever lost",
            "lost = ((i < seqlen_q) & seen & (overflow | (doubt != 0))).to(gl.int32)",
            "pass",
        ),
        (
            "store_part",
            "consumers store their parts in one place",
            "row = part * TILE_Q + W * ROWS",
            "row = part * TILE_Q",
        ),
        ("store", "no row is ever lost", "return lost.to(gl.int32)", "return lost.to(gl.int32) * 0"),
        (
            "load_tiles",
            "the end of the first attempt is not counted as a number",
            "return q_step + turn, step, ticket + turn + 1",
            "return q_step + turn, step, ticket + turn",
        ),
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
    "product_tile": [
        (
            "claimed_tile",
            "two programs may claim the same query tile",
            't = gl.num_programs(0) + gl.atomic_add(claims, 1, sem="relaxed")',
            "t = gl.num_programs(0) + gl.load(claims)\ngl.store(claims, t + 1 - gl.num_programs(0))",
        ),
        (
            "claimed_tile",
            "the first query tiles of other programs are claimed",
            't = gl.num_programs(0) + gl.atomic_add(claims, 1, sem="relaxed")',
            't = 1 + gl.atomic_add(claims, 1, sem="relaxed")',
        ),
        (
            "claimed_tile",
            "the order of claims is forgotten",
            "gl.store(after, t)",
            "gl.store(after, tiles)",
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
        for mutation in subject.mutations(BY_HAND.get(name, [])):
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
