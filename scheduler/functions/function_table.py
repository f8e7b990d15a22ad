"""Functions by name, equal ones once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ...ir.function.function import TensorFunction
from ...ir.graph.graph import CallTensor, Node


class FunctionTable:
    """The functions of a graph while calls change; starts from those that it has. Names that are ``taken`` are given to
    none."""

    def __init__(self, functions: Mapping[str, TensorFunction], taken: Collection[str] = ()) -> None:
        self.functions = dict(functions)
        self._taken = frozenset(taken)
        self._names = {f: n for n, f in functions.items()}
        # By object, since many calls bring the same one; it is kept, so that its id is its own.
        self._entered: dict[int, tuple[TensorFunction, str]] = {}

    def enter(self, function: TensorFunction) -> str:
        """The name of a function equal to this one, which is put in if there is none."""
        if id(function) not in self._entered:
            self._entered[id(function)] = function, self._enter(function)
        return self._entered[id(function)][1]

    def _enter(self, function: TensorFunction) -> str:
        known = self._names.get(function)
        if known is not None:
            return known
        base, k = function.name.rstrip("0123456789").rstrip("_") or "fused", len(self.functions)
        while (name := f"{base}_{k}") in self.functions or name in self._taken:
            k += 1
        self.functions[name] = replace(function, name=name)
        self._names[function] = name
        return name

    def used(self, nodes: Iterable[Node]) -> dict[str, TensorFunction]:
        """The functions that nodes call."""
        names = {n.function for n in nodes if isinstance(n, CallTensor)}
        return {n: f for n, f in self.functions.items() if n in names}
