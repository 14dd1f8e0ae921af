"""Break a kernel on purpose: one small change of its syntax tree at a time.

    for mutation in mutations(my_kernels):          # a module of @gluon.jit functions
        broken = mutation.load()                    # the same module with one defect
        ...                                         # run it in the simulator: does anything notice?

A detector that has never been shown a defect has not been tested. `mutations` finds every place where a
kernel could have one of the mistakes in KINDS; `edit` makes a particular one by hand. A mutated module
keeps the file and the line numbers of the original, so that findings point into its source.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

KINDS = {
    "missing wait": "a wait for a barrier is gone",
    "flipped phase": "a wait asks for the other phase",
    "missing arrival": "an arrival, or the release of a stage, is gone",
    "wrong count": "a barrier expects more or fewer arrivals",
    "wrong bytes": "a barrier expects fewer bytes",
    "early release": "an arrival comes before the wait that finishes the work",
    "late wait": "the access comes before its wait",
    "weak wait": "one more product or store may still be in flight",
    "missing fence": "no fence between the generic and the asynchronous proxy",
    "missing store wait": "nobody waits until a TMA store has read its buffer",
    "swapped barriers": "two barriers have each other's name",
    "wrong stage": "every tile uses the buffer or barrier of stage 0",
    "wrong barrier": "a copy signals the barrier of another buffer",
    "wrong coordinate": "a copy takes another tile",
    "wrong scale": "a factor is missing",
    "missing rescale": "an accumulator does not follow the row maximum",
    "wrong mask": "a comparison of a mask is off by one",
    "wrong bound": "a loop ends one step early",
    "by hand": "written out by `edit`",
}

_WAITS_OF_WORK = ("warpgroup_mma_wait", "load", "tma_store_wait", "store_wait", "fence_async_shared")
_ACCESSES = ("tma_load", "tma_reduce_add", "warpgroup_mma", "tcgen05_mma", "load", "store", "expect")


class Change(NamedTuple):
    """Statements i to j of a block become `statements`; `note` says what is different."""

    kind: str
    i: int
    j: int
    statements: list[ast.stmt]
    note: str


@dataclass(frozen=True)
class Mutation:
    """One defect of one module; `name` is unique in it and does not depend on line numbers."""

    name: str
    kind: str
    function: str
    line: int
    source: Source
    block: list[ast.stmt]
    change: Change

    def __str__(self) -> str:
        return self.name

    def load(self) -> types.ModuleType:
        """The module with this defect, and no other."""
        _, i, j, statements, _ = self.change
        kept = self.block[i:j]
        self.block[i:j] = statements
        try:
            return self.source.load()
        finally:
            self.block[i : i + len(statements)] = kept


@dataclass(frozen=True)
class Source:
    """A module's syntax tree, and what it may import instead of the real thing."""

    module: types.ModuleType
    tree: ast.Module

    @staticmethod
    def of(module: types.ModuleType) -> Source:
        return Source(module, ast.parse(inspect.getsource(module)))

    def load(self, instead: Mapping[str, types.ModuleType] | None = None) -> types.ModuleType:
        """Execute the tree as a new module. `instead`: modules by name that it imports from."""
        new = types.ModuleType(self.module.__name__)
        new.__package__, new.__file__ = self.module.__package__, self.module.__file__
        code = compile(ast.fix_missing_locations(self.tree), str(self.module.__file__), "exec")
        with mock.patch.dict(sys.modules, instead or {}):
            exec(code, new.__dict__)
        return new


def mutations(module: types.ModuleType) -> list[Mutation]:
    """Every mutation of the jit functions of a module, in the order of its lines."""
    source = Source.of(module)
    found = []
    for function in _functions(source.tree):
        for block in _blocks(function):
            for i in range(len(block)):
                for change in _changes(block, i, function):
                    found.append(_named(source, function, block, change))
    seen: Counter[str] = Counter()
    for n, m in enumerate(found):  # the same statement may stand in a function twice
        seen[m.name] += 1
        if seen[m.name] > 1:
            found[n] = replace(m, name=f"{m.name} ({seen[m.name]})")
    return found


def edit(module: types.ModuleType, function: str, name: str, old: str, new: str) -> Mutation:
    """Replace the consecutive statements `old` of a function, compared as syntax trees, by `new`.

    ValueError if `old` does not stand there exactly once.
    """
    source = Source.of(module)
    wanted = [ast.dump(s) for s in ast.parse(old).body]
    places = [
        (f, block, i)
        for f in _functions(source.tree)
        if f.name == function
        for block in _blocks(f)
        for i in range(len(block))
        if [ast.dump(s) for s in block[i : i + len(wanted)]] == wanted
    ]
    if len(places) != 1:
        raise ValueError(f"{function} of {module.__name__} has {old!r} {len(places)} times, not once")
    f, block, i = places[0]
    change = Change("by hand", i, i + len(wanted), _at(block[i], ast.parse(new).body), name)
    return _named(source, f, block, change)


def _named(source: Source, f: ast.FunctionDef, block: list[ast.stmt], change: Change) -> Mutation:
    name = f"{f.name}: {change.kind}: {change.note}"
    return Mutation(name, change.kind, f.name, block[change.i].lineno, source, block, change)


def _text(node: ast.AST) -> str:
    """The first line of a statement or expression."""
    return ast.unparse(node).split("\n")[0]


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if any(d.split(".")[-1] == "jit" for d in decorators):
                yield node


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
            for statement in block:
                yield from _blocks(statement)


def _at(place: ast.stmt, new: list[ast.stmt]) -> list[ast.stmt]:
    """New statements at the line of an old one."""
    for statement in new:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, place)
    return new


def _rewrite(kind: str, block: list[ast.stmt], i: int, old: ast.expr, new: ast.expr) -> Change:
    """Statement i with one of its expressions replaced."""
    ast.copy_location(new, old)
    note = f"{_text(old)} -> {_text(new)} in {_text(block[i])}"
    return Change(kind, i, i + 1, [copy.deepcopy(block[i], {id(old): new})], note)


def _expression(text: str, **parts: ast.AST) -> ast.expr:
    """Parse an expression whose names stand for other expressions."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return copy.deepcopy(parts.get(node.id, node))

    tree = Fill().visit(ast.parse(text, mode="eval").body)
    assert isinstance(tree, ast.expr)
    return tree


def _calls(statement: ast.AST) -> list[tuple[str, ast.Call]]:
    """Calls in a statement, by the last part of their name; of a loop or branch only in its head."""
    roots: list[ast.AST] = [statement]
    if isinstance(statement, ast.For):
        roots = [statement.iter]
    elif isinstance(statement, ast.If | ast.While):
        roots = [statement.test]
    found = []
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.Call):
                f = node.func
                name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
                if name == "wait" and ast.unparse(f) != "mbarrier.wait":
                    continue
                found.append((name, node))
    return found


def _action(statement: ast.stmt) -> tuple[str, ast.Call | None]:
    """The call that a statement consists of."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        for name, call in _calls(statement):
            if call is statement.value:
                return name, call
    return "", None


_Mutator = Callable[[list[ast.stmt], int, ast.FunctionDef], Iterator[Change]]
_MUTATORS: list[_Mutator] = []


def _changes(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    for mutator in _MUTATORS:
        yield from mutator(block, i, function)


def _mutator(f: _Mutator) -> _Mutator:
    _MUTATORS.append(f)
    return f


_DROPPED = {
    "wait": "missing wait",
    "arrive": "missing arrival",
    "release": "missing arrival",
    "tcgen05_commit": "missing arrival",
    "fence_async_shared": "missing fence",
    "tma_store_wait": "missing store wait",
    "store_wait": "missing store wait",
}


@_mutator
def _drop(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    name, _ = _action(block[i])
    if name in _DROPPED:
        yield Change(_DROPPED[name], i, i + 1, _at(block[i], [ast.Pass()]), _text(block[i]))
    for name, call in _calls(block[i]):
        if name == "wait_full" and isinstance(call.func, ast.Attribute):
            stage = _expression("ring.stage(tile)", ring=call.func.value, tile=call.args[0])
            yield _rewrite("missing wait", block, i, call, stage)


@_mutator
def _barrier_arguments(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    name, call = _action(block[i])
    if call is None:
        return
    if name == "wait":
        phase = call.args[1]
        yield _rewrite("flipped phase", block, i, phase, _expression("phase ^ 1", phase=phase))
    if name == "init":
        count = next((k.value for k in call.keywords if k.arg == "count"), call.args[-1])
        yield _rewrite("wrong count", block, i, count, _expression("count + 1", count=count))
        if not isinstance(count, ast.Constant):
            yield _rewrite("wrong count", block, i, count, _expression("1"))
    if name in ("expect", "acquire") and len(call.args) > 1:  # a queue's takes no bytes
        size = call.args[1]
        yield _rewrite("wrong bytes", block, i, size, _expression("size // 2", size=size))
        if isinstance(size, ast.BinOp):
            yield _rewrite("wrong bytes", block, i, size, copy.deepcopy(size.left))


@_mutator
def _move(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    name, _ = _action(block[i])
    if name in ("arrive", "release"):
        for j in range(i - 1, -1, -1):
            if any(n in _WAITS_OF_WORK for n, _ in _calls(block[j])):
                note = f"{_text(block[i])} before {_text(block[j])}"
                yield Change("early release", j, i + 1, [block[i], *block[j:i]], note)
                break
    if name in ("wait", "tma_store_wait", "store_wait"):
        for access in (s for s in block[i + 1 : i + 2] if any(n in _ACCESSES for n, _ in _calls(s))):
            note = f"{_text(block[i])} after {_text(access)}"
            yield Change("late wait", i, i + 2, [access, block[i]], note)


@_mutator
def _weak_wait(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    for name, call in _calls(block[i]):
        if name == "warpgroup_mma_wait":
            n = call.args[0]
            yield _rewrite("weak wait", block, i, n, _expression("n + 1", n=n))


def _indexed(function: ast.FunctionDef, name: str) -> bool:
    """Is it an array of barriers or buffers?"""
    attributes = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "index"]
    return any(isinstance(a.value, ast.Name) and a.value.id == name for a in attributes)


@_mutator
def _swap(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    s = block[i]
    if not (isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Tuple)):
        return
    if not (isinstance(s.value, ast.Name) and s.value.id == "bars"):
        return
    names = s.targets[0].elts
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for a, b in itertools.pairwise(names):
        alike = _indexed(function, _text(a)) == _indexed(function, _text(b))
        if {_text(a), _text(b)} <= read and alike:
            swapped = copy.deepcopy(s, {id(a): b, id(b): a})
            yield Change("swapped barriers", i, i + 1, [swapped], f"{_text(a)} and {_text(b)}")


@_mutator
def _copies(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    for name, call in _calls(block[i]):
        if name in ("tma_load", "tma_store", "tma_reduce_add", "load"):
            for coordinates in (a for a in call.args if isinstance(a, ast.List)):
                for part in coordinates.elts:
                    if not isinstance(part, ast.Constant):
                        moved = _expression("part + 8", part=part)
                        yield _rewrite("wrong coordinate", block, i, part, moved)
        if name in ("tma_load", "tma_store", "warpgroup_mma", "tcgen05_mma"):
            for index, at in _calls(call):
                if index == "index" and not isinstance(at.args[0], ast.Constant):
                    first = _expression("a.index(0)", a=at.func.value)  # type: ignore[attr-defined]
                    yield _rewrite("wrong stage", block, i, at, first)


@_mutator
def _wrong_barrier(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    """A copy signals the first other "full" barrier of the function."""
    name, call = _action(block[i])
    if name != "tma_load" or call is None:
        return
    full = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id.endswith("full")]
    for bar in (n for n in ast.walk(call.args[2]) if n in full):
        indexed = _indexed(function, _text(bar))
        others = (n.id for n in full if n.id != _text(bar) and _indexed(function, n.id) == indexed)
        other = next(others, None)
        if other is not None and isinstance(bar, ast.Name):
            yield _rewrite("wrong barrier", block, i, bar, _expression(other))


@_mutator
def _arithmetic(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    s = block[i]
    if not isinstance(s, ast.Assign) or not isinstance(s.targets[0], ast.Name):
        return
    for node in ast.walk(s.value):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        if isinstance(node.right, ast.Name) and "scale" in node.right.id:
            yield _rewrite("wrong scale", block, i, node, copy.deepcopy(node.left))
        elif isinstance(node.left, ast.Name) and node.left.id == s.targets[0].id:
            yield _rewrite("missing rescale", block, i, node, copy.deepcopy(node.left))


@_mutator
def _mask(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    off_by_one = {ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.LtE: ast.Lt}
    s = block[i]
    if isinstance(s, ast.Assign) and (any(n == "where" for n, _ in _calls(s)) or _text(s)[:4] == "mask"):
        for node in ast.walk(s):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in off_by_one:
                other = ast.Compare(node.left, [off_by_one[type(node.ops[0])]()], node.comparators)
                yield _rewrite("wrong mask", block, i, node, other)


@_mutator
def _bound(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> Iterator[Change]:
    s = block[i]
    if isinstance(s, ast.For) and isinstance(s.iter, ast.Call):
        for name, call in _calls(s):
            if name in ("range", "static_range") and call is s.iter:
                stop = call.args[min(1, len(call.args) - 1)]
                yield _rewrite("wrong bound", block, i, stop, _expression("n - 1", n=stop))
