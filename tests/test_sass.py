"""Reading what the assembler made of a kernel: each defect is shown, and is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import barriers
import pytest
import sass

SCRIPTS = Path(sass.__file__).parent

# A warp role with one loop of products. As ptxas writes them, the blocks that wait again stand at the
# end, behind what follows the loop, and jump back into it.
LOOP = """
.text.kernel:
  LDC R1, c[0x0][0x28] ;
  STL [R1+0x10], R2 ;
  {before}
.L_x_1:
  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
  @!P0 BRA `(.L_x_8) ;
.L_x_2:
  HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
  @P3 BRA `(.L_x_3) ;
  FSEL R24, R24, -INF , P2 ;
.L_x_3:
  MUFU.EX2 R25, R24 ;
  BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
  {inside}
  @!P1 BRA `(.L_x_1) ;
  {after}
  EXIT ;
.L_x_8:
  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
  {retry}
  @!P0 BRA `(.L_x_8) ;
  BRA `(.L_x_2) ;
"""


def listing(template: str = LOOP, **parts: str) -> str:
    """With addresses, and nothing where no part is given."""
    nothing = dict.fromkeys(("before", "inside", "after", "retry"), "")
    lines = template.format_map(nothing | parts).splitlines()
    code = (line.strip() for line in lines if line.strip())
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line}"
        for n, line in enumerate(code)
    )


def objections(text: str, log: str = "", consumers: int = 1) -> list[str]:
    return sass.objections(sass.read(text), log, consumers)


def test_known_spills_may_not_become_more():
    text = listing(inside="STL [R1+0x4], R9 ;\n  LDL R9, [R1+0x4] ;")
    found = sass.read(text)
    assert sass.objections(found, "", 1, known_spills=2) == []
    assert sass.objections(found, "", 1, known_spills=1) == sass.objections(found, "", 1) != []


def test_a_right_kernel_has_one_loop_and_no_objection():
    found = sass.read(listing())
    assert found.loops == [Counter({"HGMMA": 1, "MUFU.EX2": 1, "BAR.SYNC": 1})]
    assert found.total == Counter({"HGMMA": 1, "MUFU.EX2": 1, "BAR.SYNC": 1, "STL": 1})
    assert objections(listing()) == []
    assert "1 x 1 HGMMA, 1 MUFU.EX2, 1 BAR.SYNC" in str(found)


@pytest.mark.parametrize(
    "spill", ["STL [R1], R2 ;", "@!P0 LDL.LU.64 R2, [R1+0x8] ;", "STL.128 [R1], R4 ;"]
)
@pytest.mark.parametrize("place", ["inside", "retry"])
def test_a_spill_inside_the_loop_is_found(place, spill):
    assert objections(listing(**{place: spill})) == [
        "1 loads and stores of spilled registers in main loops"
    ]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_spill_outside_is_counted_but_allowed(place):
    text = listing(**{place: "LDL R2, [R1] ;"})
    assert objections(text) == []
    assert sass.read(text).total["LDL"] == 1


def test_other_instructions_are_not_taken_for_spills():
    assert (
        objections(listing(inside="LDS R2, [R1] ;\n  STG.E desc[UR4][R2.64], R3 ;\n  LDLX R1 ;")) == []
    )


@pytest.mark.parametrize("code", range(7510, 7520))
def test_what_ptxas_warns_of_is_found(code):
    log = f"ptxas info : (C{code}) Potential Performance Loss: wgmma.mma_async is serialized\nother\n"
    (found,) = objections(listing(), log)
    assert f"C{code}" in found and "other" not in found


def test_other_words_of_ptxas_are_not_objections():
    log = "ptxas info : Used 168 registers, 80 bytes spill stores\nptxas info : (C7509) Something else"
    assert objections(listing(), log) == []


def test_missing_products_are_found():
    assert objections(listing().replace("HGMMA.64x128x16.F32.BF16", "HMMA.16816.F32.BF16")) == [
        "no HGMMA"
    ]
    assert objections("") == ["no HGMMA"]


def test_products_outside_of_loops_are_no_main_loop():
    """The loop of one consumer lost its products; before it they are still there."""
    text = listing().replace("HGMMA", "FMUL").replace("LDC", "HGMMA")
    assert objections(text) == ["0 loops with HGMMA for 1 consumers"]


def test_each_consumer_has_its_loop():
    assert objections(listing(), consumers=2) == ["1 loops with HGMMA for 2 consumers"]


NESTED = """
.text.kernel:
  BRX R2 -0x270 (*"BRANCH_TARGETS .L_x_1,.L_x_5"*);
.L_x_1:
  LDL R2, [R1] ;
  HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], !UPT ;
.L_x_2:
  HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], R24 ;
  {inside}
  @P1 BRA `(.L_x_2) ;
.L_x_3:
  HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], R24 ;
  MUFU.EX2 R25, R24 ;
  @P2 BRA `(.L_x_3) ;
  STL [R1], R2 ;
  @P3 BRA `(.L_x_1) ;
.L_x_4:
  BAR.SYNC.DEFER_BLOCKING 0x1 ;
  EXIT ;
.L_x_5:
  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
  @!P0 BRA `(.L_x_5) ;
  BRA `(.L_x_4) ;
"""


def test_only_innermost_loops_count():
    """What is spilled once a query tile, around the loops over key tiles, is allowed."""
    found = sass.read(listing(NESTED))
    assert found.total["HGMMA"] == 3
    assert sorted(found.loops, key=len) == [Counter(HGMMA=1), Counter({"HGMMA": 1, "MUFU.EX2": 1})]
    assert objections(listing(NESTED), consumers=2) == []
    assert objections(listing(NESTED, inside="STL [R1], R3 ;"), consumers=2) != []


def test_the_producer_is_reached_by_the_jump_table_alone():
    assert sass.read(listing(NESTED)).total["BAR.SYNC"] == 1


# Compiling and the tests' interpreter exclude each other, so this runs on its own.
LIMITS = """
import types
import compile_offline as c
built = types.SimpleNamespace(metadata=types.SimpleNamespace(tmem_size=0), asm={"ptx": ""})
for shared in (227 * 1024, 227 * 1024 + 1):
    print(repr(c.objection(built, {"shared": shared}, c.ARCHES["sm_90"])))
try:
    c.resources(built, "a log without numbers", c.ARCHES["sm_90"])
except ValueError as error:
    print(error)
"""


def test_too_much_shared_memory_and_a_missing_log_are_found():
    pytest.importorskip("triton.backends.nvidia.compiler")
    environment = os.environ | {"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, env=environment, check=True
    )
    fits, too_much, no_log = done.stdout.splitlines()
    assert fits == "''"
    assert "needs 232449 bytes of shared memory, has 232448" in too_much
    assert "no register count" in no_log


SPECIALIZED = """
    %done = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    %full = ttg.local_alloc : () -> !ttg.memdesc<3x1xi64, #shared2, #smem, mutable>
    %turns = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    %numbers = ttg.local_alloc : () -> !ttg.memdesc<13x1xi32, #shared2, #smem, mutable>
    ttng.init_barrier %done, 3 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    %0 = ttg.memdesc_index %full[%c0_i32] : !ttg.memdesc<3x1xi64, #shared2, #smem, mutable>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    ttg.warp_specialize({given})
    default {
      ttng.wait_barrier {here}, %c0_i32 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    }
    partition0(%arg0: !ttg.memdesc<1xi64, #shared2, #smem, mutable>) num_warps(4) {
      %done = ttg.memdesc_index %arg0[%c0_i32] : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    }
"""


@pytest.mark.parametrize(
    ("given", "here", "idle"),
    [
        ("%full, %turns, %done", "%full", []),
        ("%full, %turns", "%full", ["%done"]),
        ("%full", "%turns", ["%done"]),
        ("%full", "%full", ["%done", "%turns"]),
    ],
)
def test_barriers_that_nothing_uses_are_found(given: str, here: str, idle: list[str]):
    """Their state was written over outputs that had been given their memory."""
    text = SPECIALIZED.replace("{given}", given).replace("{here}", here)
    assert barriers.idle(text) == idle
