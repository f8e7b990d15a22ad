"""Every pass is declared in one list, in an order that gives it what it needs, and is a function of its own file."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torch_mlc.dynamo_backend.compiling.pass_lists import pass_lists
from torch_mlc.ir.passes import Form, Pass, check_order

LISTS = dict(pass_lists())
PASSES: list[tuple[str, Pass[Any, Any]]] = [(name, p) for name, passes in LISTS.items() for p in passes]
# What runs one behind the other over the same thing.
CHAINS = {
    "joint": ("joint", "forward"), "joint, backward": ("joint", "backward"),
    "inference": ("inference", "part", "frozen", "aten"),
    "graph": ("graph",), "calls": ("fuse", "calls", "layers"), "function": ("function",), "text": ("host", "text"),
    "code": ("host", "code"),
}  # fmt: skip


def test_every_level_has_a_list() -> None:
    assert {p.level.name for _, p in PASSES} == {"aten", "graph", "calls", "function", "host"}
    assert {name for chain in CHAINS.values() for name in chain} == LISTS.keys()


@pytest.mark.parametrize("chain", CHAINS)
def test_each_pass_finds_what_it_needs(chain: str) -> None:
    check_order([p for name in CHAINS[chain] for p in LISTS[name]])


@pytest.mark.parametrize(("name", "p"), PASSES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_pass_is_named_as_its_function_which_is_public(name: str, p: Pass[Any, Any]) -> None:
    module = inspect.getmodule(p.function)
    assert module is not None and module.__name__.startswith("torch_mlc.")
    assert p.name == p.function.__name__ and not p.name.startswith("_")
    assert inspect.getdoc(p.function), f"{p.name} says nothing of what it does"
    if name == "graph":
        assert module.__name__.rpartition(".")[2] == p.name, "one file a pass over graphs"


def called_in(function: Any) -> set[str]:
    """The names that a function calls."""
    tree = ast.parse(inspect.getsource(function))
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def test_no_pass_runs_another() -> None:
    functions = {p.name for _, p in PASSES}
    faults = {p.name: found for _, p in PASSES if (found := (called_in(p.function) & functions) - {p.name})}
    assert not faults


def test_a_pass_has_one_name_and_a_name_one_pass() -> None:
    owners: dict[str, set[str]] = {}
    for _, p in PASSES:
        owners.setdefault(p.name, set()).add(inspect.getfile(p.function))
    assert not {name: files for name, files in owners.items() if len(files) > 1}
    twice = Counter((name, p.name) for name, p in PASSES)
    assert {key for key, count in twice.items() if count > 1} == {("graph", "eliminate_dead")}


def test_forms_are_told_apart_by_name() -> None:
    forms = {f for _, p in PASSES for f in (*p.needs, *p.leaves) if isinstance(f, Form)}
    assert len({f.name for f in forms}) == len(forms) > 0


def test_docs_name_every_list() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "debugging.md").read_text()
    assert all(p.level.name in text for _, p in PASSES)
