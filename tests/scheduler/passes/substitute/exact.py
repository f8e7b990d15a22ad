"""Graphs over rational numbers: every sum, product, quotient and comparison is exact.

Inputs are whole numbers of 61 bits at random. Both sides of a rule are polynomials of few degrees in them, or such of
parts that a maximum or a position chooses. Two polynomials that differ are equal at such a point with a probability of
their degree over 2**61, as over a prime field of that size; unlike there, an order is known, so that a maximum is one.
A function that is no arithmetic (an exponential) is any function: equal numbers have equal images, which is all that a
rule may know of it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from torch_mlc.ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, Var, is_value
from torch_mlc.ir.graph.graph import Compute, Graph, Input, Library, Reduction, View
from torch_mlc.ir.oracle.text import index_text
from torch_mlc.scheduler.passes.products.operands import product_of

Env = Mapping[str, int]
BITS = 61

_EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    "div": lambda a, b: Fraction(a) / b if b else math.nan, "maximum": max, "minimum": min, "abs": abs,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "logical_and": lambda a, b: a and b,
}  # fmt: skip


class OutOfRange(Exception):
    """An index beside its tensor."""


def numbers(rng: random.Random, shape: Sequence[int]) -> Any:
    """An array of whole numbers at random."""
    array = np.empty(tuple(shape), object)
    for at in np.ndindex(*shape):
        array[at] = rng.getrandbits(BITS)
    return array


def run_exact(graph: Graph, given: Sequence[Any]) -> list[Any]:
    """What a graph returns, of inputs in their order. Raises: OutOfRange."""
    names = [i.name for i in graph.inputs if isinstance(i, Input)]
    arrays: dict[str, Any] = dict(zip(names, given, strict=True))
    for node in graph.nodes:
        match node:
            case Compute():
                arrays[node.name] = _filled(
                    node.type.shape, node.axes, lambda env, n=node: value_of(n.value, env, arrays)
                )
            case View():
                load = Load(node.source, node.indices, node.type.dtype)
                arrays[node.name] = _filled(node.type.shape, node.axes, lambda env, e=load: value_of(e, env, arrays))
            case Reduction():
                _reduce(node, arrays)
            case Library():
                arrays[node.names[0]] = _multiplied(node, arrays)
            case _:
                raise NotImplementedError(type(node).__name__)
    return [arrays[o] for o in graph.outputs if isinstance(o, str)]


def value_of(e: Expr, env: Env, arrays: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression where axes are at given places."""

    def go(e: Expr) -> Any:
        match e:
            case Load(buffer, indices, _):
                at = tuple(int(go(i)) if is_value(i) else index_of(i, env) for i in indices)
                array = arrays[buffer]
                if any(not 0 <= i < n for i, n in zip(at, array.shape, strict=True)):
                    raise OutOfRange(f"{buffer}[{at}] of {array.shape}")
                return array[at]
            case Const(value, _):
                whole = isinstance(value, (bool, int)) or math.isinf(value) or math.isnan(value)
                return value if whole else Fraction(value)
            case IndexValue(index, _):
                return index_of(index, env)
            case Cast(inner, dtype):
                return int(go(inner)) if dtype.is_int else go(inner)
            case Select(condition, if_true, if_false):
                return go(if_true) if go(condition) else go(if_false)
            case Var(name, _):
                assert state is not None
                return state[name]
            case Call("check_bounds", (x, low, high, _)):
                index = go(x)
                if not go(low) <= index < go(high):
                    raise OutOfRange(f"{index} is no index")
                return index
            case Call(fn, args, _):
                found = [go(a) for a in args]
                return _EXACT[fn](*found) if fn in _EXACT else _any_function(fn, found)

    return go(e)


def index_of(index: sympy.Expr, env: Env) -> int:
    """The value of an index expression."""
    return int(index) if index.is_Integer else int(eval(index_text(index, lambda s: str(env[s.name])), {"max": max}))


def _any_function(fn: str, args: list[Any]) -> int:
    text = f"{fn} {[str(a) for a in args]}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> (64 - BITS)


def _filled(shape: Sequence[sympy.Expr], axes: Sequence[sympy.Symbol], value: Callable[[Env], Any]) -> Any:
    array = np.empty(tuple(int(n) for n in shape), object)
    for at in np.ndindex(*array.shape):
        array[at] = value({a.name: i for a, i in zip(axes, at, strict=True)})
    return array


def _reduce(node: Reduction, arrays: dict[str, Any]) -> None:
    shape = tuple(int(n) for n in node.types[0].shape)
    found = [np.empty(shape, object) for _ in node.names]
    types = tuple(v.dtype for v in node.values)
    left, right = ([Var(f"{side}{k}", t) for k, t in enumerate(types)] for side in ("a", "b"))
    combined = node.monoid.combine(tuple(left), tuple(right))
    for at in np.ndindex(*shape):
        env = {a.name: i for a, i in zip(node.axes, at, strict=True)}
        state = [value_of(c, {}, {}) for c in node.monoid.identity(types)]
        for over in itertools.product(*(range(int(n)) for n in node.reduce_shape)):
            inside = {**env, **{a.name: i for a, i in zip(node.reduce_axes, over, strict=True)}}
            one = [value_of(v, inside, arrays) for v in node.values]
            both = {v.name: x for v, x in zip((*left, *right), (*state, *one), strict=True)}
            state = [value_of(c, {}, {}, both) for c in combined]
        for array, x in zip(found, state, strict=True):
            array[at] = x
    arrays.update(zip(node.names, found, strict=True))


def _multiplied(node: Library, arrays: Mapping[str, Any]) -> Any:
    p = product_of(node)
    assert p is not None, node.target
    left, right = arrays[p.left], arrays[p.right]
    result = Fraction(p.alpha) * (left @ right if left.shape[-1] else _zeros(left, right))
    return result if p.added is None else result + Fraction(p.beta) * arrays[p.added]


def _zeros(left: Any, right: Any) -> Any:
    array = np.empty((*left.shape[:-1], right.shape[-1]), object)
    array[...] = 0
    return array


__all__ = ["OutOfRange", "numbers", "run_exact", "value_of"]
