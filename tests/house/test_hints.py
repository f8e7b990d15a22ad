"""The table of hints is true, and nothing is said or read past it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torch_mlc.ir.nest import hints
from torch_mlc.ir.nest.hints import HINTS, Hint

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ir", "scheduler", "codegen", "runtime", "dynamo_backend")
TABLE = "ir.nest.hints"
NAMES = {name: h for name, h in vars(hints).items() if isinstance(h, Hint)}
# For people: no rule gives these. What they do is tested in tests/codegen.
BY_HAND = {"GRAIN": '"grain"'}
# What gives those that ``annotate`` does not.
GIVERS = {
    "lowering": "scheduler.functions.lower",
    "tensorize": "scheduler.primitives.loops.tensorize",
    "blockize": "scheduler.primitives.loops.blockize",
    "atomic": "scheduler.primitives.memory.atomic",
    "decompose_online": "scheduler.primitives.analysis.live",
}


@cache
def _pieces() -> tuple[tuple[str, ast.AST], ...]:
    files = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    named = ((".".join(p.relative_to(ROOT).with_suffix("").parts), p) for p in files)
    return tuple((m, n) for m, p in named if m != TABLE for n in ast.walk(ast.parse(p.read_text())))


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in NAMES}


def attributes(name: str, *which: str) -> set[str]:
    """The modules that take one of these attributes of a hint."""
    return {
        m
        for m, n in _pieces()
        if isinstance(n, ast.Attribute) and n.attr in which and isinstance(n.value, ast.Name) and n.value.id == name
    }


def annotations_given() -> Iterator[tuple[str, ast.Call]]:
    for module, node in _pieces():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "annotate":
            yield module, node


def test_every_hint_is_in_the_table() -> None:
    assert [name.lower() for name in NAMES] == list(HINTS) and list(NAMES.values()) == list(HINTS.values())


@pytest.mark.parametrize("name", NAMES)
def test_its_readers_read_it(name: str) -> None:
    """They ask it, or hand it to a function of theirs that does."""
    readers = attributes(name, "of", "found")
    for module, node in _pieces():
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            readers |= {module for a in node.args if isinstance(a, ast.Name) and a.id == name}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            readers |= {module for e in node.value.elts if isinstance(e, ast.Name) and e.id == name}
    assert readers and readers == set(NAMES[name].readers)


@pytest.mark.parametrize("name", NAMES)
def test_something_gives_it(name: str) -> None:
    giver = NAMES[name].given_by
    if name in BY_HAND:
        tests = [p.read_text() for p in (ROOT / "tests" / "codegen").rglob("test_*.py")]
        assert any(BY_HAND[name] in text for text in tests) and giver == "annotate"
    elif giver == "annotate":
        given = [m for m, call in annotations_given() if name in names_in(call.args[1])]
        assert given and all(m.startswith("scheduler.rules.") for m in given)
    else:
        assert GIVERS[giver] in attributes(name, "name")


def test_nothing_is_said_by_a_name_in_quotes() -> None:
    """A hint is given and read as the object that the table has."""
    wrong = [
        (m, call.lineno)
        for m, call in annotations_given()
        if m.startswith("scheduler.rules.") and not names_in(call.args[1])
    ]
    for module, node in _pieces():
        match node:
            case ast.Call(func=ast.Name(id="dict"), args=[ast.Attribute(attr="annotations")]):
                wrong.append((module, node.lineno))
            case ast.comprehension(iter=ast.Attribute(attr="annotations")):
                if not module.startswith("ir.text.") and module != "scheduler.primitives.analysis.tree":
                    wrong.append((module, node.iter.lineno))
            case ast.keyword(arg="annotations") if any(
                isinstance(c, ast.Constant) and str(c.value).partition(":")[0] in HINTS for c in ast.walk(node.value)
            ):
                wrong.append((module, node.value.lineno))
    assert not wrong
