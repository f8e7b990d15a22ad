"""``torch_mlc.register_converter``: what an op means, told by a user."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ...ir.expr.dtypes import DType
from ...ir.expr.formula import Formula
from ...ir.registration import LOCK, Registration, RegistrationError, nearest
from . import CONVERTERS, Converter, ImportContext, NoConversion, Tensor

Op: TypeAlias = str | OpOverload | OpOverloadPacket | CustomOpDef
_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?")
# The converters of users, by op, the last one in force; and what ours are, of those ops that have one.
_ADDED: dict[str, list[tuple[object, Converter]]] = {}
_OURS: dict[str, Converter] = {}


def register_converter(
    op: Op, function: Converter | None = None, *, pointwise: bool = False, replace: bool = False
) -> Any:
    """Tell what an op means, so that it is fused with what is around it; otherwise it is a call of the op itself.

    ``op`` is one of ATen's or of ``torch.library``: ``"mylib::softcap"``, ``"aten.celu.default"``, an OpOverload, or
    what ``torch.library.custom_op`` gives. ``function(ctx, *args, **kwargs)`` is given the arguments of a call, tensors
    as ``Tensor`` and sizes as sympy expressions, and gives one ``Tensor``, or a tuple with one for each result; what it
    may use of ``ctx`` is ``ImportContext``. It raises ``torch_mlc.NoConversion`` to leave a call to the op itself, with
    the reason that reports give.

    With ``pointwise`` it is a formula: ``function(*values)`` is given one element of each operand as a
    ``torch_mlc.Formula``, in the type in which the result is computed (float32 for half types), and gives that of the
    result, or a tuple of those of all results. Flags, strings and None are given as they are.

    Without a ``function`` this is a decorator. An op that has a converter keeps it, unless ``replace`` is given.
    Raises: RegistrationError for an op that there is not, that no backend is given, or that has a converter.
    """
    if function is None:
        return partial(register_converter, op, pointwise=pointwise, replace=replace)
    if not callable(function):
        raise RegistrationError(f"a converter is a function, not a {type(function).__name__}")
    overload = overload_of(op)
    name = str(overload)
    made: Converter = partial(_pointwise, function) if pointwise else function
    with LOCK:
        if name in CONVERTERS and not replace:
            whose = "a registered one" if name in _ADDED else "one of torch-mlc's"
            raise RegistrationError(
                f"{name} has a converter already, {whose}; register_converter(…, replace=True) takes its place"
            )
        if name not in CONVERTERS:
            _check_arrives(overload)
        if name in CONVERTERS and name not in _ADDED:
            _OURS[name] = CONVERTERS[name]
        token = object()
        _ADDED.setdefault(name, []).append((token, made))
        CONVERTERS[name] = made
        return Registration("converter of", name, function, partial(_take_back, name, token))


def _take_back(name: str, token: object) -> None:
    left = [entry for entry in _ADDED.pop(name) if entry[0] is not token]
    if left:
        _ADDED[name] = left
        CONVERTERS[name] = left[-1][1]
    elif (ours := _OURS.pop(name, None)) is not None:
        CONVERTERS[name] = ours
    else:
        del CONVERTERS[name]


def new_ops() -> frozenset[str]:
    """The ops that have a converter of a user's, and none of ours."""
    return frozenset(_ADDED.keys() - _OURS.keys())


def overload_of(op: Op) -> OpOverload:
    """The overload that somebody names. Raises RegistrationError where there is none, or several."""
    match op:
        case OpOverload():
            return op
        case CustomOpDef():
            return op._opoverload
        case OpOverloadPacket():
            return _overload(op, "")
        case str():
            return _named(op)
    raise RegistrationError(
        f"an op is a name such as 'mylib::softcap' or 'aten.celu.default', or an op of torch.ops, "
        f"not a {type(op).__name__}"
    )


def _named(text: str) -> OpOverload:
    match = _NAME.fullmatch(text)
    if match is None:
        raise RegistrationError(f"{text!r} names no op; write 'namespace::name' or 'namespace::name.overload'")
    namespace, name, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        known = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
        raise RegistrationError(
            f"there is no op {namespace}::{name} (one of torch.library must be defined before its converter)"
            f"{nearest(f'{namespace}::{name}', known)}"
        )
    return _overload(packet, overload or "")


def _overload(packet: OpOverloadPacket, name: str) -> OpOverload:
    there = set(torch._C._dispatch_get_all_op_names())  # TorchScript knows more, of plain numbers
    full = str(packet._qualified_op_name)
    known = [n for n in packet.overloads() if (full if n == "default" else f"{full}.{n}") in there]
    chosen = name or ("default" if "default" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        what = f"has no overload {name!r}" if name else "has several overloads, of which one must be named"
        raise RegistrationError(f"{full} {what}: {', '.join(known)}{nearest(name, known)}")
    return getattr(packet, chosen)  # type: ignore[no-any-return]


def _check_arrives(op: OpOverload) -> None:
    """Raises RegistrationError for an op that torch has made others of before a backend is given a graph."""
    if op._schema.is_mutable:
        raise RegistrationError(
            f"{op} writes to its arguments; a backend is given functional graphs, in which no such op is left"
        )
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        raise RegistrationError(
            f"{op} is composed of other ops (CompositeImplicitAutograd), and torch takes it apart before a backend is "
            "given a graph; register converters of those ops, or a pattern (torch_mlc.register_pattern)"
        )


def _pointwise(function: Callable[..., Any], ctx: ImportContext, *args: Any, **kwargs: Any) -> Any:
    """The result of a point-wise op, or all of its results, by a formula of one element of each operand."""
    if isinstance(ctx.val, (tuple, list)):
        return tuple(_one(function, ctx, args, kwargs, k) for k in range(len(ctx.val)))
    return _one(function, ctx, args, kwargs, None)


def _one(
    function: Callable[..., Any], ctx: ImportContext, args: tuple[Any, ...], kwargs: Mapping[str, Any], k: int | None
) -> Tensor:
    given = dict(enumerate(args)) | dict(kwargs)
    operands = {key: x for key, x in given.items() if _is_operand(x)}

    def value(*values: Any) -> Any:
        known = {**given, **{key: Formula(v) for key, v in zip(operands, values, strict=True)}}
        found = function(*(known[n] for n in range(len(args))), **{name: known[name] for name in kwargs})
        if k is not None:
            found = found[k]
        if not isinstance(found, Formula):
            raise RegistrationError(
                f"the formula of {ctx.node.target} gives a {type(found).__name__}; it must give a torch_mlc.Formula"
            )
        return found.value

    return ctx.pointwise(value, *operands.values(), dtype=_computed(ctx, operands.values(), k), k=k)


def _is_operand(x: Any) -> bool:
    return isinstance(x, (Tensor, int, float, sympy.Basic)) and not isinstance(x, bool)


def _computed(ctx: ImportContext, operands: Any, k: int | None) -> DType:
    """The type in which a result is computed; a condition, in that of its operands."""
    kind = ctx.type(k).dtype.compute
    if kind is not DType.BOOL:
        return kind
    kinds = {x.dtype.compute for x in operands if isinstance(x, Tensor)}
    if len(kinds) != 1:
        raise NoConversion(f"a condition over operands of {len(kinds)} types")
    return kinds.pop()
