"""Code of others in our modules is told from our own, and from other code, by what it does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from torch_mlc.ir.passes import GRAPH, Pass
from torch_mlc.ir.registration import Registration
from torch_mlc.runtime.cache import foreign_code as module
from torch_mlc.runtime.cache.fingerprint import ROOMS
from torch_mlc.runtime.cache.foreign_code import ForeignCode, UnknownCode, described, foreign_code
from torch_mlc.scheduler import passes, rules
from torch_mlc.scheduler.rules.registry import Rule

FACTOR = 2
# Modules for processes in which Triton interprets kernels.
INTERPRETING = "torch_mlc.runtime.interpreter."


def by_factor(x: float) -> float:
    return x * FACTOR


def of(factor: object, more: int = 1) -> Callable[..., Any]:
    def scaled(x: Any, by: int = more) -> Any:
        return x * factor + by

    return scaled


def test_nothing_is_foreign_in_a_process_that_has_patched_nothing() -> None:
    """With all of our modules and what they import, the libraries that this project depends on."""
    for room in ROOMS:
        package = import_module(f"torch_mlc.{room}")
        for info in walk_packages(package.__path__, f"torch_mlc.{room}."):
            if not info.name.startswith(INTERPRETING):
                import_module(info.name)
    found = foreign_code()
    assert (found.text, found.unknown) == ("", "")
    assert foreign_code() == found, "and nothing was looked at again"


PLACES: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "function of a module": lambda patch, fn: patch.setattr("torch_mlc.scheduler.functions.lower.lower_to_loops", fn),
    "imported function": lambda patch, fn: patch.setattr("torch_mlc.scheduler.fusion.fuse.assemble", fn),
    "method": lambda patch, fn: patch.setattr(Rule, "applies", fn, raising=False),
    "static method": lambda patch, fn: patch.setattr(Rule, "applies", staticmethod(fn), raising=False),
    "converter": lambda patch, fn: patch.setitem(
        sys.modules["torch_mlc.dynamo_backend.converters.registry"].CONVERTERS, "aten.sin.default", fn
    ),
    "new op": lambda patch, fn: patch.setitem(
        sys.modules["torch_mlc.dynamo_backend.converters.registry"].CONVERTERS, "mine.op.default", fn
    ),
    "pass": lambda patch, fn: patch.setattr(
        passes, "GRAPH_PASSES", (Pass("mine", GRAPH, fn), *passes.GRAPH_PASSES)
    ),
    "rule": lambda patch, fn: patch.setattr(
        rules, "RULES", (Rule("mine", ("cpu",), fn, fn, lambda *_: {}), *rules.RULES[1:])
    ),
    "part of a partial": lambda patch, fn: patch.setattr(
        "torch_mlc.scheduler.fusion.fuse.assemble", partial(torch.add, fn)
    ),
    "decomposition": lambda patch, fn: patch.setitem(
        torch._decomp.decomposition_table, torch.ops.aten.sin.default, fn
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_code_of_others_is_found_where_it_is_put(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    for fn in (of(2), of(3), of(2)):
        with monkeypatch.context() as patch:
            PLACES[place](patch, fn)
            texts.append(foreign_code().text)
        assert foreign_code().text == ""
    assert texts[0] and texts[0] == texts[2] != texts[1]


def test_a_function_under_another_name_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    table, fn = sys.modules["torch_mlc.dynamo_backend.converters.registry"].CONVERTERS, of(2)
    found = []
    for name in ("mine.op.default", "mine.other.default"):
        with monkeypatch.context() as patch:
            patch.setitem(table, name, fn)
            found.append(foreign_code())
    assert found[0].text != found[1].text and found[0].state != found[1].state


def test_ops_and_registrations_are_described_by_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def op(by: int) -> Any:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * by

        return torch.library.custom_op("mlc_tests_foreign::scaled", scaled, mutates_args=())

    assert described(op(2)) == described(op(2)) != described(op(3))
    registered = [Registration("rule", name, of(by), lambda: None) for name, by in (("a", 1), ("a", 2), ("b", 1))]
    assert len({described(r) for r in registered}) == 3


def test_what_cannot_be_told_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for fn in (Mock(), of(object()), of(torch.ones(2))):
        with monkeypatch.context() as patch:
            patch.setattr("torch_mlc.scheduler.functions.lower.lower_to_loops", fn)
            found = foreign_code()
        assert isinstance(found, ForeignCode) and "lower_to_loops" in found.unknown, found


def test_what_a_function_does_is_its_code_and_all_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert described(of(2)) == described(of(2))
    assert (
        len({described(f) for f in (of(2), of(2.0), of("2"), of((2,)), of(2, 2), of(of(2)), of(of(3)), by_factor)}) == 8
    )
    before = described(by_factor)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert described(by_factor) != before
    assert described(of({"a": [1, {2}], "b": torch.float32})) == described(of({"a": [1, {2}], "b": torch.float32}))


def test_functions_that_call_one_another() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert described(even) and described(even) != described(odd)


def test_objects_that_are_described_by_what_they_hold() -> None:
    class Own:
        def method(self) -> int:
            return 1

    class Other:
        def method(self) -> int:
            return 2

    assert described(Own) != described(Other)
    with pytest.raises(UnknownCode, match="Own"):
        described(Own())
    assert described(ModuleType("some")) == "module some" and module.PACKAGE == "torch_mlc"
