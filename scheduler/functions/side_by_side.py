"""Functions that do one thing several times, side by side: as many calls of a function that does it once."""

from __future__ import annotations

from dataclasses import replace

from ...ir.expr.value import Load, rename_loads, walk
from ...ir.function.function import Stage, TensorFunction
from ...ir.graph.graph import CallTensor
from .unify import has_rows


def one_of(function: TensorFunction) -> TensorFunction | None:
    """What a function that reduces rows does for each of its results, with canonical names; None where those have
    anything in common that is read or made, or are not made in the same way."""
    parts = _parts(function)
    if parts is None or any(part != parts[0][0] for part, _ in parts):
        return None
    return parts[0][0]


def calls_side_by_side(call: CallTensor, function: TensorFunction, name: str) -> list[CallTensor]:
    """A call of such a function as calls of what it does for each result, which has a name now."""
    found = _parts(function)
    assert found is not None and call.count == 1
    calls = []
    for k, (_, given) in enumerate(found):
        into = (call.into[k],) if call.into else ()
        args = tuple(call.args[g] for g in given)
        calls.append(replace(call, names=(call.names[k],), types=(call.types[k],), args=args, function=name, into=into))
    return calls


def _parts(function: TensorFunction) -> list[tuple[TensorFunction, tuple[int, ...]]] | None:
    """What each result is made by, and the inputs that this reads by their places; None where two share any."""
    if not has_rows(function) or function.table or any(o.buffer in function.inputs for o in function.outputs):
        return None
    places = {b.name: k for k, b in enumerate(function.inputs)}
    found = []
    taken: set[str] = set()
    for output in function.outputs:
        stages = _needed(function.stages, output.result)
        made = [r for s in stages for r in s.results]
        read = sorted(
            {e.buffer for s in stages for v in s.values for e in walk(v) if isinstance(e, Load)} & set(places)
        )
        if not taken.isdisjoint((*made, *read)):
            return None
        taken.update((*made, *read))
        given = tuple(sorted(places[name] for name in read))
        names = {function.inputs[g].name: f"in{k}" for k, g in enumerate(given)}
        names |= {r: f"t{k}" for k, r in enumerate(made)}
        part = replace(
            function,
            inputs=tuple(replace(function.inputs[g], name=names[function.inputs[g].name]) for g in given),
            outputs=(replace(output, buffer=replace(output.buffer, name="out0"), result=names[output.result]),),
            stages=tuple(_renamed(s, names) for s in stages),
        )
        found.append((part, given))
    return found


def _needed(stages: tuple[Stage, ...], result: str) -> list[Stage]:
    """The stages that a result is made of, in order."""
    wanted, kept = {result}, list[Stage]()
    for s in reversed(stages):
        if not wanted.isdisjoint(s.results):
            kept.insert(0, s)
            wanted |= {e.buffer for v in s.values for e in walk(v) if isinstance(e, Load)}
    return kept


def _renamed(stage: Stage, names: dict[str, str]) -> Stage:
    values = tuple(rename_loads(v, names) for v in stage.values)
    return replace(stage, results=tuple(names[r] for r in stage.results), values=values)


__all__ = ["calls_side_by_side", "one_of"]
