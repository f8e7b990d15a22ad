"""Steps of a schedule as a lock file has them, ``a, b = s.split(loop='b0_i0', factors=[None, 16])``, read back."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from ...ir.errors import IRError
from ...ir.text.parser_expr import index
from ...scheduler.schedule.trace import VARIADIC, Step, StepRef, Trace


def parsed_trace(lines: Iterable[str], rule: str) -> Trace:
    """The trace of its steps' lines. Raises ValueError, which has the line that is no step."""
    return Trace(tuple(map(parsed_step, lines)), rule)


def parsed_step(line: str) -> Step:
    """A step of its text (``str(step)``). Raises ValueError."""
    try:
        (statement,) = ast.parse(line).body
        results: tuple[str, ...] = ()
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            results = tuple(n.id for n in names if isinstance(n, ast.Name))
        call = statement.value  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            raise ValueError
        primitive = call.func.attr
        args: list[tuple[str, Any]] = []
        if primitive in VARIADIC:
            args.append((VARIADIC[primitive], tuple(map(_value, call.args))))
        elif call.args:
            raise ValueError
        args += [(str(k.arg), _value(k.value)) for k in call.keywords]
    except (SyntaxError, ValueError, AttributeError, TypeError, IRError):
        raise ValueError(f"{line!r} is no step of a schedule") from None
    return Step(primitive, tuple(args), results)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return tuple(map(_value, elements))
        case ast.Name(id=name):
            return StepRef(name)
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=str() as text)]):
            return index(ast.parse(text, mode="eval").body)
    return ast.literal_eval(node)
