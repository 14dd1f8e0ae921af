"""The roofline: the article's numbers, earlier drafts', what holds for every GPU, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.perf import gpus, problem, results
from tilewise.perf.gpus import GPUS
from tilewise.perf.memory import SelfAttention
from tilewise.perf.roofline import Plan, problem_bound, tile_bound, usual_tile
from tilewise.perf.tile_work import Tile, products

CUBE = Tile(128, 128, 128)


def roofline(*arguments: str):
    return CliRunner().invoke(app, ["roofline", *arguments], env={"COLUMNS": "120"})


def cycles(gpu: str, direction: str, tile: Tile = CUBE, **plan: object) -> list[float]:
    """Of the tensor cores, the exponential unit and shared memory."""
    found = tile_bound(GPUS[gpu], direction, tile, Plan(**plan)).cycles
    return [found[name] for name in ("tensor cores", "exponential unit", "shared memory")]


def test_the_articles_table_for_b200():
    """FlashAttention-4, M = N = D = 128: both forward tables and both backward ones."""
    assert cycles("b200", "forward") == [1024, 1024, 768]
    assert cycles("b200", "forward", Tile(256, 128, 128)) == [2048, 2048, 1536]
    assert cycles("b200", "backward") == [2560, 1024, 3328]
    assert cycles("b200", "backward", pair=True) == [2560, 1024, 2688]


def test_the_backward_of_b200_is_bound_by_shared_memory_operand_by_operand():
    """Eight operands of 256 cycles, dS written once, dQ written and read in fp32."""
    bound = tile_bound(GPUS["b200"], "backward", CUBE, Plan())
    assert [move.bytes // 128 for move in bound.shared] == [*[256] * 9, 512, 512]
    assert bound.binds == ["shared memory"]
    assert bound.utilisation == pytest.approx(2560 / 3328)


def test_exchanging_ds_halves_what_dq_moves():
    """dQ 2 × 256 instead of 2 × 512; its right operand, of twice the keys, is halved back to 256."""
    assert cycles("b200", "backward", pair=True, exchange_ds=True) == [2560, 1024, 2304]


def test_fp8_doubles_the_tensor_cores_and_leaves_the_exponentials():
    assert cycles("b200", "forward", dtype="fp8") == [512, 1024, 384]
    assert cycles("h100", "forward", dtype="fp8")[:2] == [1024, 1024]
    assert Plan(dtype="fp8").directions() == ("forward",)


def test_the_labs_64_by_128_backward_tile_on_hopper():
    """Worked out by hand for a real kernel: about 2940 cycles of shared memory, 2560 of products."""
    tensor, _, shared = cycles("h200", "backward", Tile(64, 128, 128), loads=True)
    assert (tensor, shared) == (2560, 2944)


def test_a_wgmma_from_shared_memory_wants_96_bytes_a_cycle():
    """Q K^T with both operands in shared memory: M=64 rows of Q against all keys, once a warpgroup."""
    bound = tile_bound(GPUS["h200"], "forward", CUBE, Plan())
    read = {move.what: move.bytes for move in bound.shared}
    assert (read["Q read for S"] + read["K read for S"]) / (bound.cycles["tensor cores"] / 2) == 96


def test_q_in_registers_spares_shared_memory_only():
    with_it, without = cycles("h200", "forward", q_in_registers=True), cycles("h200", "forward")
    assert without[2] - with_it[2] == 128 * 128 * 2 / 128
    assert without[:2] == with_it[:2]


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_polynomial_moves_exponentials_to_the_fma_units(fraction):
    before = tile_bound(GPUS["b200"], "forward", CUBE, Plan(dtype="fp8"))
    after = tile_bound(GPUS["b200"], "forward", CUBE, Plan(dtype="fp8", exp_fraction=fraction))
    assert after.cycles["exponential unit"] == 1024 * (1 - fraction)
    assert after.cycles["FMA units"] == before.cycles["FMA units"] + 128 * 128 * fraction * 6 / 128
    assert after.utilisation > before.utilisation  # in fp8 the exponentials bind


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_bound_promises_more_than_the_peak(gpu, head_dim, direction):
    for causal in (False, True):
        bound = problem_bound(GPUS[gpu], direction, SelfAttention(4096, head_dim, 16, 1, causal), Plan())
        assert 0.3 < bound.utilisation <= 1


def test_products_do_the_flops_that_are_counted():
    """A forgotten or a doubled product would show as a wrong utilisation only."""
    for pair in (False, True):
        options = Plan(pair=pair, exchange_ds=pair).options("backward")
        assert sum(p.flops for p in products("backward", Tile(64, 128, 96), options)) == (
            10 * 64 * 128 * 96
        )


def test_rows_that_no_instruction_has_are_paid_for():
    """64 query rows on Blackwell cost as much as 128."""
    assert cycles("b200", "forward", Tile(64, 128, 128))[0] == 1024


def test_a_whole_problem_is_its_tiles_over_the_sms():
    gpu, p = GPUS["h200"], SelfAttention(8192, 128, heads=16)
    bound = problem_bound(gpu, "forward", p, Plan())
    assert bound.cycles["tensor cores"] == pytest.approx(p.flops("forward") / 4096 / 132)
    assert bound.cycles["HBM"] == pytest.approx(
        (4 * 16 * 8192 * 128 * 2 + 16 * 8192 * 4) / 4.8e12 * 1.98e9
    )


def test_the_tables_agree_with_the_data_sheets():
    """TFLOP/s as printed there, at the clock they are printed for."""
    for name, clock, tflops in [("a100", 1.41e9, 312), ("h100", 1.83e9, 989), ("b200", 1.856e9, 2250)]:
        gpu = replace(GPUS[name], boost_hz=clock)
        assert gpu.peak_flops("bf16") / 1e12 == pytest.approx(tflops, rel=2e-3)


def test_a_drivers_name_is_understood():
    assert gpus.find("NVIDIA H200") is GPUS["h200"]
    assert gpus.find("NVIDIA A100-SXM4-80GB") is GPUS["a100"]


def test_usual_tiles_cover_every_head_dim():
    for gpu in GPUS.values():
        assert usual_tile(gpu, "forward", 1) and usual_tile(gpu, "backward", 256)


# The command


def test_json_of_a_tile():
    shown = json.loads(roofline("--gpu", "b200", "--tile", "128,128,128", "--json").stdout)
    forward, backward = shown["bounds"]
    assert forward["cycles"]["shared memory"] == 768
    assert backward["cycles"]["shared memory"] == backward["limit"] == 3328
    assert backward["binds"] == ["shared memory"]


def test_the_table_shows_cycles_and_what_binds():
    shown = roofline("--gpu", "b200", "--tile", "128,128,128").stdout
    assert re.search(r"shared memory +768 +3,328", shown)
    assert re.search(r"binds +tensor cores, exponential unit +shared memory", shown)


def test_a_whole_problem_has_memory_too():
    shown = roofline("--gpu", "h200", "--seqlen", "8192", "--head-dim", "128", "--causal")
    assert shown.exit_code == 0, shown.output
    assert "HBM" in shown.stdout and "TFLOP/s" in shown.stdout and "causal" in shown.stdout


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path, suffix):
    file = tmp_path / f"bounds.{suffix}"
    assert roofline("--gpu", "b200", "--picture", str(file)).exit_code == 0
    assert file.stat().st_size > 1000


def test_memory_of_every_algorithm():
    shown = json.loads(roofline("--memory", "--seqlen", "4096", "--head-dim", "64", "--json").stdout)
    moved = {name: each["forward"]["moved_bytes"] for name, each in shown["algorithms"].items()}
    assert moved["fa2"] < moved["fa1"] < moved["materialised"]
    table = roofline("--memory", "--seqlen", "4096", "--sram", "100000").stdout
    assert "materialised" in table and "FA1" in table and "N²d²/M" in table


CELL = {"direction": "forward", "head_dim": 128, "seqlen": 8192, "causal": False, "tflops": 650.0}


@pytest.fixture
def result(tmp_path):
    def write(content: object) -> str:
        file = tmp_path / "result.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    return write


def test_measurements_beside_their_bound(result):
    content = {
        "gpu": "NVIDIA H200",
        "cells": [
            CELL | {"contender": "tilewise"},
            CELL | {"direction": "forward+backward"},
            CELL | {"tflops": None},
            CELL | {"window": [128, 0]},
            CELL | {"heads": 16, "kv_heads": 2},
            {"error": "no number"},
        ],
    }
    shown = json.loads(roofline("--measured", result(content), "--json").stdout)
    (cell,) = shown["cells"]  # the others are no single measurement, and do not spoil the rest
    assert shown["gpu"] == "H200" and cell["contender"] == "tilewise"
    assert cell["bound_tflops"] == pytest.approx(132 * 4096 * 1.98e9 / 1e12)
    assert cell["share"] == pytest.approx(650 / cell["bound_tflops"])
    assert "61%" in roofline("--measured", result(content)).stdout


def test_the_file_of_tilewise_bench_is_understood(tmp_path):
    """As the benchmark itself writes it, so that the two cannot drift apart."""
    sizes = {"batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 64, "head_dim_v": 64}
    p = problem.Problem(seqlen=4096, dtype="bf16", causal=True, **sizes)
    measurements = (
        results.Measurement("triton/fa2", "ok", ms=1.0, tflops=300.0),
        results.Measurement("fa3", "unsupported", reason="not installed"),
    )
    found = results.Run(
        *("2026-11-29", "abc", {}, {"device": "cuda", "name": "NVIDIA H200"}, {}, {}, []),
        cells=[results.Cell(p, "backward", p.flops("backward"), measurements)],
    )
    results.write(found, tmp_path / "run.json")
    (cell,) = json.loads(roofline("--measured", str(tmp_path / "run.json"), "--json").stdout)["cells"]
    assert (cell["contender"], cell["direction"], cell["tflops"]) == ("triton/fa2", "backward", 300.0)
    assert p.flops("backward") == SelfAttention(4096, 64, 16, 2, causal=True).flops("backward")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "mi300"], "unknown GPU 'mi300'"),
        (["--gpu", ""], "unknown GPU"),
        (["--tile", "128,128"], "tile: got '128,128'"),
        (["--tile", "128,0,128"], "tile: got"),
        (["--tile", "128,-1,128"], "tile: got"),
        (["--tile", "128,128,512"], "tile: got"),
        (["--tile", "a,b,c"], "tile: got"),
        (["--seqlen", "128", "--tile", "64,64,64"], "must be the head dim"),
        (["--dtype", "fp4"], "dtype: got 'fp4'"),
        (["--memory", "--dtype", "fp4"], "dtype: got 'fp4'"),
        (["--gpu", "a100", "--dtype", "fp8"], "the tensor cores of A100"),
        (["--gpu", "h100", "--two-cta"], "Blackwell only"),
        (["--exchange-ds"], "only a pair"),
        (["--q-registers"], "no operand from registers"),
        (["--exp-fraction", "1.5"], "exp fraction"),
        (["--exp-fraction", "nan"], "exp fraction"),
        (["--picture", "bounds.pdf"], "must end in .png or .svg"),
        (["--picture", "nowhere/bounds.png"], "cannot write to"),
        (["--memory", "--picture", "a.png"], "only the bounds are drawn"),
        (["--measured", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, message):
    check_refused(roofline(*arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ([1, 2], "not a benchmark result"),
        ({"what": "an older file", "time": []}, "not a benchmark result"),
        ({"gpu": "H200", "cells": "none"}, "not a benchmark result"),
        ({"cells": [CELL]}, "names no GPU"),
        ({"gpu": "AMD EPYC", "cells": [CELL]}, "unknown GPU 'AMD EPYC'"),
        ({"gpu": "H200", "cells": []}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"seqlen": "8k"}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"head_dim": 1000}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"seqlen": 10**200}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"seqlen": True}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"dtype": ["bf16"]}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"tflops": 10**400}]}, "has no cell of H200 with"),
        ({"gpu": "H200", "cells": [CELL | {"tflops": float("nan")}]}, "has no cell of H200 with"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_foreign_result_is_one_line_and_exit_status_2(result, content, message):
    check_refused(roofline("--measured", result(content)), message)


def test_what_one_gpu_did_says_nothing_of_another(result):
    """An H200's result against the B200's bounds was a table like any other."""
    content = {"machine": {"name": "NVIDIA H200"}, "cells": [CELL]}
    message = "was measured on NVIDIA H200, which is not B200"
    check_refused(roofline("--gpu", "b200", "--measured", result(content)), message)


def test_without_matplotlib_the_picture_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    check_refused(roofline("--picture", str(tmp_path / "a.png")), "matplotlib is missing")


def check_refused(outcome, message: str) -> None:
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("tilewise roofline: ") and message in line
