"""What a person asked `tilewise bench` for, and the plan it means on this machine.

Both front ends, the command line and ``python -m tilewise.perf``, fill in the same ``Request``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tilewise.dispatch import Direction
from tilewise.perf import cycles, grid, peers
from tilewise.perf.bench import Plan
from tilewise.perf.grid import BadRequest
from tilewise.perf.peers import Contender
from tilewise.perf.problem import DIRECTIONS


def _option(help: str, default: str | None = None) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Request:
    """The options as text; None is what the preset says. ``plan`` gives them their meaning."""

    preset: str = _option(f"Which grid: {', '.join(grid.PRESETS)}.", "quick")
    direction: str = _option("forward, backward or both.", "both")
    head_dim: str | None = _option("Head dims, such as 64,128.")
    head_dim_v: str | None = _option("Head dim of the values; that of the queries if not given.")
    seqlen: str | None = _option("Sequence lengths, such as 512..16k (doubling) or 1k,3000.")
    causal: str | None = _option("yes, no or both.")
    dtype: str | None = _option("Data types: bf16, fp16, fp32.")
    tokens: str | None = _option("Tokens per problem: the batch is tokens / sequence length.")
    heads: str | None = _option("Query heads; as many as make a width of 2048 if not given.")
    kv_heads: str | None = _option("Key and value heads; as many as query heads if not given.")
    algorithms: str = _option("Kernels of Tilewise: auto, none, or a list such as triton/fa2.", "auto")
    peers: str = _option("Other implementations: auto, none, or a list such as fa2,cudnn,naive.", "auto")
    rounds: str = _option("Rounds that count, for each contender and problem.", "12")
    time_limit: str | None = _option("Seconds after which no new problem begins.")
    device: str = _option("auto, cpu or cuda.", "auto")
    out: str | None = _option("Where to write the result, as JSON.")

    def plan(self, *, count_cycles: bool = False) -> Plan:
        """What to measure, in what order, and who takes part here. Raises BadRequest."""
        device = _device(self.device)
        problems = grid.problems(self._axes(device))
        both = {"forward": DIRECTIONS[:1], "backward": DIRECTIONS[1:], "both": DIRECTIONS}
        directions: tuple[Direction, ...] = grid.one_of(self.direction, "--direction", both)
        present, absent, notes = _contenders(self.algorithms, self.peers, device)
        counter = None
        if count_cycles:
            missing = cycles.missing(device)
            counter = None if missing else cycles.Nsight()
            notes += [f"no cycles: {missing}"] if missing else []
        return Plan(
            problems=problems,
            directions=directions,
            contenders=present,
            device=device,
            rounds=grid.size(self.rounds, "--rounds"),
            time_limit=None if self.time_limit is None else _seconds(self.time_limit),
            absent=absent,
            notes=notes,
            request={name: value for name, value in asdict(self).items() if name != "out"},
            out=None if self.out is None else _writable(Path(self.out)),
            counter=counter,
        )

    def _axes(self, device: torch.device) -> grid.Axes:
        changes: dict[str, Any] = {}
        for name, key in (("head_dim", "head_dims"), ("seqlen", "seqlens")):
            if (text := getattr(self, name)) is not None:
                changes[key] = grid.sizes(text, _spelled(name))
        if self.head_dim is not None:  # a preset's values had the preset's queries beside them
            changes["head_dim_v"] = None
        for name in ("tokens", "heads", "kv_heads", "head_dim_v"):
            if (text := getattr(self, name)) is not None:
                changes[name] = grid.size(text, _spelled(name))
        if self.causal is not None:
            meanings = {"yes": (True,), "no": (False,), "both": (False, True)}
            changes["causals"] = grid.one_of(self.causal, "--causal", meanings)
        if self.dtype is not None:
            changes["dtypes"] = grid.words(self.dtype, "--dtype", ("bf16", "fp16", "fp32"))
        return replace(grid.preset(self.preset, device.type), **changes)


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


#: What each option is for, by the name of its field.
HELP: dict[str, str] = {f.name: f.metadata["help"] for f in fields(Request)}


def _device(text: str) -> torch.device:
    grid.one_of(text, "--device", {"auto": None, "cpu": None, "cuda": None})
    gpu = torch.cuda.is_available()
    if text == "cuda" and not gpu:
        raise BadRequest("--device: got 'cuda'; PyTorch sees no GPU here")
    if text == "cpu" or not gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadRequest(f"--time-limit: got {text!r}; allowed is a number of seconds")
    return value


def _writable(path: Path) -> Path:
    """Checked before the work, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not known:
            path.unlink()
    except OSError as error:
        raise BadRequest(f"--out: cannot write {path}: {error.strerror}") from None
    return path


def _contenders(
    algorithms: str, others: str, device: torch.device
) -> tuple[list[Contender], list[tuple[Contender, str]], list[str]]:
    """Who takes part, who does not and why, and what of that is worth a line.

    "auto" is everybody who can: that something is not installed is then no news, that it is broken is.
    """
    present: list[Contender] = []
    absent: list[tuple[Contender, str]] = []
    notes: list[str] = []
    for option, text, known in (
        ("--algorithms", algorithms, peers.own()),
        ("--peers", others, peers.peers()),
    ):
        if text == "none":
            continue
        asked = text != "auto"
        for name in grid.words(text, option, tuple(known)) if asked else tuple(known):
            contender = known[name]
            absence = contender.absent(device)
            if absence is None and not asked:
                absence = _left_out_of_auto(name, device)
            if absence is None:
                present.append(contender)
                continue
            absent.append((contender, absence.reason))
            if asked or absence.broken:
                notes.append(f"{name} takes no part: {absence.reason}")
    if not present:
        reasons = "; ".join(notes) or "none was asked for"
        raise BadRequest(f"there is nobody to measure: {reasons}")
    return present, absent, notes


def _left_out_of_auto(name: str, device: torch.device) -> peers.Absence | None:
    if name.startswith("triton/") and device.type == "cpu":
        return peers.Absence("Triton's interpreter is there to test kernels, not to time them")
    return None
