"""What the assembler made of a kernel: its loops of tensor-core products, and what else is in them.

Reads what ``nvdisasm -c`` prints of a cubin for sm_90. Control flow is followed, not the order of lines:
the code that waits again for a barrier stands at the end of a function, and belongs to the loop that
jumps there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

PRODUCT, EXP, BARRIER = "HGMMA", "MUFU.EX2", "BAR.SYNC"
LOCAL = ("STL", "LDL")  # to and from what has been spilled
COUNTED = (PRODUCT, EXP, BARRIER, *LOCAL)

Graph = dict[int, list[int]]  # instructions, and which may come next


class Sass(NamedTuple):
    """How often COUNTED occur in the whole kernel, and in each of its main loops: the innermost loops
    that contain products."""

    total: Counter[str]
    loops: list[Counter[str]]

    def __str__(self) -> str:
        alike = Counter(_text(loop) for loop in self.loops)
        loops = "; ".join(f"{n} x {text}" for text, n in alike.items())
        return f"{_text(self.total)}; main loops: {loops}"

    def spills(self) -> int:
        """Loads and stores of spilled registers inside main loops."""
        return sum(loop[name] for loop in self.loops for name in LOCAL)


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in COUNTED if counts[name])


def read(listing: str) -> Sass:
    """Count the instructions of a kernel and of its main loops."""
    instructions, labels = _parse(listing)
    names = [_counted(text) for text in instructions]
    graph = {n: _next(n, instructions, labels) for n in range(len(instructions))}
    products = {n for n, name in enumerate(names) if name == PRODUCT}
    loops = [Counter(names[n] for n in loop if names[n]) for loop in _innermost(graph, graph, products)]
    return Sass(Counter(name for name in names if name), loops)


def objections(sass: Sass, log: str, consumers: int, known_spills: int = 0) -> list[str]:
    """What must not be in a kernel with so many consumers, given ptxas's log of it."""
    found = [f"ptxas: {line.strip()}" for line in log.splitlines() if re.search(r"\(C751\d\)", line)]
    if sass.total[PRODUCT] == 0:
        found.append(f"no {PRODUCT}")
    elif len(sass.loops) < consumers:
        found.append(f"{len(sass.loops)} loops with {PRODUCT} for {consumers} consumers")
    if sass.spills() > known_spills:
        found.append(f"{sass.spills()} loads and stores of spilled registers in main loops")
    return found


def _parse(listing: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and the number of the one after each label."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*([.$][\w.$]+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
    return instructions, labels


def _counted(text: str) -> str:
    """Which of COUNTED an instruction is, or nothing."""
    text = re.sub(r"^@\S+\s+", "", text)
    return next((name for name in COUNTED if re.match(rf"{re.escape(name)}\b", text)), "")


def _next(n: int, instructions: list[str], labels: dict[str, int]) -> list[int]:
    """A branch goes to any label that it names; all but unconditional ones go on as well."""
    targets = [labels[word] for word in re.findall(r"[.$][\w.$]+", instructions[n]) if word in labels]
    if not re.match(r"(BRA `|BRX\b|EXIT\b|RET\b)", instructions[n]):
        targets.append(n + 1)
    return [t for t in targets if t < len(instructions)]


def _innermost(part: Graph, whole: Graph, wanted: set[int]) -> Iterator[set[int]]:
    """Loops that contain something wanted and no smaller loop that does.

    A loop is a strongly connected component; without the instructions by which it is entered, the loops
    inside it remain."""
    for loop in _components(part):
        if not loop & wanted:
            continue
        entries = {t for n, targets in whole.items() if n not in loop for t in targets if t in loop}
        inside = {n: [t for t in part[n] if t in loop - entries] for n in loop - entries}
        smaller = list(_innermost(inside, whole, wanted)) if entries else []
        yield from smaller or [loop]


def _components(graph: Graph) -> Iterator[set[int]]:
    """Strongly connected components with at least one edge inside (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in graph:
        work = [] if root in index else [(root, iter(graph[root]))]
        while work:
            n, targets = work[-1]
            if n not in index:
                index[n] = low[n] = len(index)
                stack.append(n)
                on_stack.add(n)
            for t in targets:
                if t not in index:
                    work.append((t, iter(graph[t])))
                    break
                if t in on_stack:
                    low[n] = min(low[n], index[t])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[n])
                if low[n] == index[n]:
                    at = stack.index(n)
                    component = set(stack[at:])
                    del stack[at:]
                    on_stack -= component
                    if len(component) > 1 or n in graph[n]:
                        yield component
