"""Element-wise functions with scalars of their own: the scalars that leave them are made apart, the others for every
element, so that the loop over elements can be cut anywhere."""

from __future__ import annotations

from dataclasses import replace

from ...ir.expr.value import Expr, Load, cast, rewrite, walk
from ...ir.function.function import Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor
from ...ir.nest.loops import Buffer
from .lower import renumber


def is_elementwise(function: TensorFunction) -> bool:
    """Whether every stage computes one value a point, and nothing is combined."""
    return not function.extra and all(s.monoid is None and s.axes is None for s in function.stages)


def split_scalars(call: CallTensor, function: TensorFunction) -> list[tuple[CallTensor, TensorFunction]] | None:
    """The call as one of the scalars, if any leave it, and one of the elements; None where the function is not such.

    It has a single row: what is computed once a row is a scalar.
    """
    if function.rows or not function.inner or not is_elementwise(function) or call.into:
        return None
    scalars = {s.results[0]: s.values[0] for s in function.stages if not s.inner}
    leaving = [o for o in function.outputs if o.result in scalars]
    if any(scalars[o.result].dtype is not o.buffer.dtype for o in leaving):
        return None  # kept wider inside than it is stored
    if len(leaving) == len(function.outputs):
        return None
    parts = []
    made = {o.result: n for o, n in zip(function.outputs, call.names, strict=True) if o in leaving}
    if leaving:
        stages = _needed(tuple(s for s in function.stages if not s.inner), leaving)
        small = replace(function, inner=(), outputs=tuple(leaving), stages=stages)
        parts.append(_part(call, function, small, {}))
    known: dict[str, Expr] = {}
    given: list[Buffer] = []

    def leaf(e: Expr) -> Expr | None:
        return cast(known[e.buffer], e.dtype) if isinstance(e, Load) and e.buffer in known else None

    # Scalars that leave are read back; they are the same numbers.
    read_back: dict[str, str] = {}
    for o in leaving:
        buffer = replace(o.buffer, name=f"in{len(function.inputs) + len(given)}")
        given.append(buffer)
        read_back[buffer.name] = made[o.result]
        known[o.result] = Load(buffer.name, o.indices, buffer.dtype)
    elements: list[Stage] = []
    for s in function.stages:
        values = tuple(rewrite(v, leaf) for v in s.values)
        if s.inner:
            elements.append(replace(s, values=values, inner=False))
        else:
            known.setdefault(s.results[0], values[0])
    rest = tuple(o for o in function.outputs if o not in leaving)
    large = replace(
        function, rows=function.inner, inner=(), outputs=rest, stages=tuple(elements),
        inputs=(*function.inputs, *given),
    )  # fmt: skip
    parts.append(_part(call, function, large, read_back))
    return parts


def _needed(stages: tuple[Stage, ...], outputs: list[Output]) -> tuple[Stage, ...]:
    wanted = {o.result for o in outputs}
    kept = []
    for s in reversed(stages):
        if wanted & set(s.results):
            kept.append(s)
            wanted |= {e.buffer for v in s.values for e in walk(v) if isinstance(e, Load)}
    return tuple(reversed(kept))


def _part(
    call: CallTensor, whole: TensorFunction, part: TensorFunction, extra: dict[str, str]
) -> tuple[CallTensor, TensorFunction]:
    """A function that is part of another with canonical names, and its call; ``extra`` inputs by buffer."""
    args = dict(zip((b.name for b in whole.inputs), call.args, strict=True)) | extra
    results = {o.result: (n, t) for o, n, t in zip(whole.outputs, call.names, call.types, strict=True)}
    used = {e.buffer for e in part.loads}
    inputs = [b for b in part.inputs if b.name in used]
    names = {b.name: f"in{k}" for k, b in enumerate(inputs)}
    names |= {s.results[0]: f"t{k}" for k, s in enumerate(part.stages)}

    def leaf(e: Expr) -> Expr | None:
        return Load(names[e.buffer], e.indices, e.dtype) if isinstance(e, Load) and e.buffer in names else None

    function = renumber(
        replace(
            part,
            inputs=tuple(replace(b, name=names[b.name]) for b in inputs),
            outputs=tuple(
                replace(o, buffer=replace(o.buffer, name=f"out{k}"), result=names[o.result])
                for k, o in enumerate(part.outputs)
            ),
            stages=tuple(
                replace(s, results=(names[s.results[0]],), values=tuple(rewrite(v, leaf) for v in s.values))
                for s in part.stages
            ),
        )
    )
    made = [results[o.result] for o in part.outputs]
    return (
        CallTensor(
            tuple(n for n, _ in made), tuple(t for _, t in made), "", tuple(args[b.name] for b in inputs), call.sizes,
            call.origins,
        ),
        function,
    )  # fmt: skip
