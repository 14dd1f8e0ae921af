"""What a person gets who installs the package: small, pure, typed, quick to import, no surprises."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tilewise"

#: Who may import what besides torch, Triton and the standard library: folder or file -> packages.
EXTRAS = {
    "cli": {"typer", "rich"},
    "compat/hf.py": {"transformers"},
    "demo/picture.py": {"matplotlib"},
    "perf/plot.py": {"matplotlib"},
    "sim/": {"numpy", "ml_dtypes", "greenlet"},
    "perf/roofline_picture.py": {"matplotlib"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    assert built.stat().st_size < 1_000_000
    return zipfile.ZipFile(built)


def test_the_wheel_is_pure(wheel):
    assert wheel.filename is not None and wheel.filename.endswith("-py3-none-any.whl")
    assert {Path(name).suffix for name in wheel.namelist() if name.startswith("tilewise/")} == {
        ".py",
        ".typed",
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"tilewise", f"tilewise-{tilewise.__version__}.dist-info"}
    shipped = {name for name in wheel.namelist() if name.endswith(".py")}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}


def test_the_wheel_is_typed_and_licensed(wheel):
    assert "tilewise/py.typed" in wheel.namelist()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_dependencies_are_the_ones_chosen():
    extras: dict[str, set[str]] = {}
    for requirement in metadata.requires("tilewise") or []:
        name = re.match(r"[\w-]+", requirement)
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        assert name
        extras.setdefault(extra[1] if extra else "", set()).add(name[0].replace("-", "_"))
    assert extras == {
        "": {"torch", "triton"},
        "cli": {"typer", "rich"},
        "bench": {"matplotlib", "pandas"},
        "sim": {"numpy", "ml_dtypes", "greenlet"},
        "hf": {"transformers"},
        "dev": {"pytest", "hypothesis", "pytest_xdist", "ruff", "mypy", "transformers"},
    }


def test_the_version_is_one():
    assert metadata.version("tilewise") == tilewise.__version__


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_are_dependencies(path):
    place = path.relative_to(PACKAGE).as_posix()
    allowed = {"tilewise", "torch"} | set(sys.stdlib_module_names)
    allowed |= {"triton"} if place.startswith(("backends/", "gluon/", "sim/")) else set()
    for owner, packages in EXTRAS.items():
        allowed |= packages if place.startswith(owner) else set()
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported <= allowed


def _import(before: str = "") -> dict[str, object]:
    """`import tilewise` in a new process, after torch: its time, and which modules are there then."""
    code = (
        f"import json, sys, time, torch\n{before}\nstart = time.perf_counter()\nimport tilewise\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps({'seconds': seconds, 'modules': list(sys.modules)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_importing_is_quick_and_leaves_triton_alone():
    runs = [_import() for _ in range(3)]
    assert min(run["seconds"] for run in runs) <= 0.3  # the best: others may be using the machine
    modules = set(runs[0]["modules"])
    unwanted = {"triton", "typer", "rich", "matplotlib", "transformers", "tilewise.demo", "tilewise.cli"}
    assert not modules & unwanted


def test_importing_needs_no_triton():
    _import(before="sys.modules['triton'] = None")
