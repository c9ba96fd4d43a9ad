"""The arrows of docs/architecture.md, checked from the imports; and what must appear nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "epdecode"
FILES = sorted(PACKAGE.rglob("*.py"))

NO_TORCH = [
    "cli",
    "config",
    "config.load",
    "config.docs",
    "errors",
    "launch.command",
    "launch.env",
    "models",
    "models.hf",
    "plan",
    "plan.expert_choice",
    "plan.placement_study",
    "registry",
    "report.commands",
    "result",
    "result.document",
    "result.partial",
    "result.samples",
    "result.save",
    "result.status",
    "result.timing",
    "routing.command",
    "routing.load",
    "routing.table",
    "routing.trace",
    "watch",
    "weights.layout",
]
"""Modules that a machine without torch can import; so may nothing they import."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, deferred: bool = False) -> Iterator[str]:
    """Modules a file imports: at its top level, or also inside functions."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if deferred else _top(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top(node.body)


def below(prefix: str) -> list[Path]:
    return [path for path in FILES if name_of(path).startswith(f"epdecode.{prefix}")]


@pytest.mark.parametrize("path", below("kernels"), ids=name_of)
def test_kernels_know_only_torch_triton_and_the_nouns(path: Path) -> None:
    ours = {m for m in imports(path) if m.startswith("epdecode")}
    allowed = ("epdecode.kernels", "epdecode.batch", "epdecode.errors")
    assert all(module.startswith(allowed) for module in ours), ours


@pytest.mark.parametrize("seam", ["transport", "experts"])
def test_members_never_import_the_other_seam_or_those_above(seam: str) -> None:
    other = "experts" if seam == "transport" else "transport"
    above = ("build", "layer", "graphs", "loop", "run", "session", "verify", "report")
    for path in below(f"{seam}."):
        for module in imports(path, deferred=True):
            assert not module.startswith(f"epdecode.{other}"), (name_of(path), module)
            assert module.split(".")[:2] not in [["epdecode", name] for name in above]


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch_below_the_plan(name: str) -> None:
    seen: set[str] = set()
    todo = [f"epdecode.{name}"]
    files = {name_of(path): path for path in FILES}
    while todo:
        module = todo.pop()
        if module in seen or module not in files:
            continue
        seen.add(module)
        # Importing a module runs every package above it first.
        todo += [module.rpartition(".")[0]]
        for imported in imports(files[module]):
            assert imported.split(".")[0] not in ("torch", "triton"), (module, imported)
            todo.append(imported)
    assert seen


def test_no_module_is_imported_while_it_imports() -> None:
    """Any module may be the first that a program imports: no circle through any of them."""
    files = {name_of(path): path for path in FILES}
    needs = {name: _needed(name, path, files) for name, path in files.items()}
    for name in files:
        circle = _circle(name, needs)
        assert not circle, " -> ".join(circle)


def _needed(name: str, path: Path, files: dict[str, Path]) -> set[str]:
    """What runs before ``name`` can: what it imports and the packages above that, but not its own
    packages, which are under way already."""
    found: set[str] = set()
    for imported in imports(path):
        while imported in files or "." in imported:
            if imported in files and imported != name and not name.startswith(f"{imported}."):
                found.add(imported)
            imported = imported.rpartition(".")[0]
    return found


def _circle(start: str, needs: dict[str, set[str]]) -> list[str]:
    """A way from ``start`` back to it, empty when there is none."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop()
        for module in needs[way[-1]]:
            if module == start:
                return [*way, start]
            if module not in seen:
                seen.add(module)
                ways.append([*way, module])
    return []


def test_the_layer_names_no_backend() -> None:
    text = (PACKAGE / "layer.py").read_text()
    assert not any(word in text for word in ("deepep", "deep_gemm", "deepgemm", "triton", "cuda"))


@pytest.mark.parametrize("name", ["layer", "graphs", "loop"])
def test_the_step_asks_no_questions_about_the_device(name: str) -> None:
    text = (PACKAGE / f"{name}.py").read_text()
    assert not any(word in text for word in ("isinstance(", "is_cuda", "device.type"))


def test_nothing_is_pickled() -> None:
    for path in FILES:
        for module in imports(path, deferred=True):
            assert module.split(".")[0] not in ("pickle", "cPickle", "dill", "shelve", "marshal")
        text = path.read_text()
        for call in ("torch.load(", "all_gather_object", "broadcast_object", "gather_object"):
            assert call not in text, (name_of(path), call)
