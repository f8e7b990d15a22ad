"""Runs imported graphs, without the compiler: library calls by torch, all else by definition.

``run_oracle`` asks the oracle and is meant for small tensors; ``run_fast`` evaluates each node with whole torch
tensors, and refuses loads out of range wherever their guard lets them happen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from torch_mlc.ir.expr.iterations import ITERATIONS
from torch_mlc.ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, Var, is_value
from torch_mlc.ir.graph.graph import (
    CONSTANT,
    Compute,
    ConstantRef,
    Graph,
    Input,
    Library,
    Reduction,
    Ref,
    Scan,
    Scatter,
    SizeInput,
    View,
)
from torch_mlc.ir.oracle.ops import function
from torch_mlc.ir.oracle.oracle import run_graph, size

Tensor = torch.Tensor


def bind_sizes(graph: Graph, args: Sequence[Any]) -> dict[str, int]:
    """The size symbols that the integer arguments and the tensors' shapes give."""
    sizes: dict[str, int] = {}
    for i, a in zip(graph.inputs, args, strict=True):
        pairs = (
            [(i.value, a)]
            if isinstance(i, SizeInput)
            else [*zip(i.type.shape, a.shape, strict=True), *zip(i.type.strides, a.stride(), strict=True)]
        )
        sizes |= {e.name: int(v) for e, v in pairs if e.is_Symbol}
    return sizes


def call_library(node: Library, lookup: Callable[[str], Any], sizes: Mapping[str, int], constants: Any) -> list[Any]:
    """The results of a library call, by torch."""

    def value(a: Any) -> Any:
        match a:
            case Ref(name):
                return lookup(name)
            case ConstantRef(name):
                return constants[name].value
            case sympy.Basic():
                return size(a, sizes)
            case tuple():
                return [value(x) for x in a]
        return a

    if node.target == "mlc::seeds":
        return [torch.arange(1, node.args[0] + 1, dtype=torch.int64) * 7919]
    if node.target == CONSTANT:
        return [constants[node.args[0]].value]
    namespace, _, rest = node.target.partition("::")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    result = op(*(value(a) for a in node.args), **{k: value(v) for k, v in node.kwargs})
    return list(result) if isinstance(result, (list, tuple)) else [result]


# --- by the oracle
# ------------------------------------------------------------------------------------------------------


def to_numpy(t: Tensor) -> np.ndarray[Any, Any]:
    t = t.detach()
    if t.dtype is torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


def to_torch(a: np.ndarray[Any, Any]) -> Tensor:
    a = np.ascontiguousarray(a).reshape(a.shape)
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(a.copy())


def run_oracle(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """The outputs of a graph, in order."""
    sizes = bind_sizes(graph, args)
    arrays = {i.name: to_numpy(a) for i, a in zip(graph.inputs, args, strict=True) if isinstance(i, Input)}

    def library(node: Library, live: Mapping[str, Any]) -> list[Any]:
        kinds = graph.types()

        def lookup(name: str) -> Tensor:
            # ATen may look at strides, so operands have those of their type.
            shape = [size(e, sizes) for e in kinds[name].shape]
            strides = [size(e, sizes) for e in kinds[name].strides]
            return torch.empty_strided(shape, strides, dtype=kinds[name].dtype.torch).copy_(to_torch(live[name]))

        results = call_library(node, lookup, sizes, graph.constants)
        return [None if r is None else to_numpy(r) for r in results]

    results = run_graph(graph, arrays, sizes, library=library)
    return [collect(o, {k: to_torch(v) for k, v in results.items()}, sizes) for o in graph.outputs]


def collect(output: Any, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Any:
    if output is None or isinstance(output, str):
        return None if output is None else tensors[output]
    return size(output, sizes)


# --- by whole tensors
# ---------------------------------------------------------------------------------------------------


def _in_range(index: Tensor, low: Tensor, high: Tensor, dim: Tensor) -> Tensor:
    assert bool(((index >= low) & (index < high)).all()), f"an index is out of range of dimension {int(dim)}"
    return index


def _not_zero(divisor: Tensor) -> Tensor:
    assert bool((divisor != 0).all()), "an integer is divided by zero"
    return divisor


_OTHER_NAMES = {
    "neg": torch.neg, "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "floordiv": torch.floor_divide,
    "div": lambda a, b: torch.div(a, b).to(a.dtype), "bit_and": torch.bitwise_and, "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor, "bit_not": torch.bitwise_not, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "check_bounds": _in_range, "check_divisor": _not_zero,
}  # fmt: skip
_REDUCERS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda v: v.sum(-1, dtype=v.dtype), "product": lambda v: v.prod(-1, dtype=v.dtype),
    "max": lambda v: v.amax(-1), "min": lambda v: v.amin(-1), "any": lambda v: v.any(-1), "all": lambda v: v.all(-1),
}  # fmt: skip


class _Evaluator:
    def __init__(self, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        self.tensors, self.sizes = tensors, sizes
        self.axes: dict[str, Tensor] = {}
        self.vars: dict[str, Tensor] = {}

    def open(self, names: Sequence[sympy.Symbol], extents: Sequence[int]) -> None:
        for k, (name, n) in enumerate(zip(names, extents, strict=True)):
            self.axes[name.name] = torch.arange(n).reshape([-1 if j == k else 1 for j in range(len(extents))])

    def index(self, e: Any) -> Any:
        if is_value(e):
            return self.value(e, None)
        if e.is_Integer:
            return int(e)
        if e.is_Symbol:
            return self.axes[e.name] if e.name in self.axes else self.sizes[e.name]
        args = [self.index(a) for a in e.args]
        match e:
            case sympy.Add():
                return reduce(operator.add, args)
            case sympy.Mul():
                return reduce(operator.mul, args)
            case sympy.Pow():
                return args[0] ** args[1]
            case FloorDiv():
                return args[0] // args[1]
            case ModularIndexing():
                return (args[0] // args[1]) % args[2]
            case CeilDiv():
                return -(-args[0] // args[1])
        return {"Max": max, "Min": min}[type(e).__name__](*args)

    def value(self, e: Expr, mask: Tensor | None) -> Tensor:
        match e:
            case Const():
                return torch.tensor(e.value, dtype=e.dtype.torch)
            case Var():
                return self.vars[e.name]
            case IndexValue():
                return torch.as_tensor(self.index(e.index)).to(e.dtype.torch)
            case Cast():
                return self.value(e.value, mask).to(e.dtype.torch)
            case Load():
                return self.load(e, mask)
            case Select():
                condition = self.value(e.condition, mask)
                yes = condition if mask is None else condition & mask
                no = ~condition if mask is None else ~condition & mask
                return torch.where(condition, self.value(e.if_true, yes), self.value(e.if_false, no))
            case Call():
                return self.call(e, [self.value(a, mask) for a in e.args])

    def call(self, e: Call, args: list[Tensor]) -> Tensor:
        if e.fn in ("rand", "randn", "randbits", *ITERATIONS):
            kind = e.args[0].dtype
            operands = torch.broadcast_tensors(*args)
            fn = function(e.fn, kind, e.dtype)
            columns = (map(kind.numpy.type, a.flatten().tolist()) for a in operands)
            with np.errstate(all="ignore"):
                flat = [fn(*row) for row in zip(*columns, strict=True)]
            return torch.tensor(np.array(flat, dtype=e.dtype.numpy)).reshape(operands[0].shape)
        assert len({a.dtype for a in args}) == 1, e
        result = (_OTHER_NAMES.get(e.fn) or getattr(torch, e.fn))(*args)
        return result.to(e.dtype.torch)

    def load(self, e: Load, mask: Tensor | None) -> Tensor:
        source = self.tensors[e.buffer]
        assert source.dtype is e.dtype.torch, e
        places = []
        for i, n in zip(e.indices, source.shape, strict=True):
            place = torch.as_tensor(self.value(i, mask) if is_value(i) else self.index(i))
            wrong = (place < 0) | (place >= n)
            assert not (wrong if mask is None else wrong & mask).any(), f"{e} is out of range of {n}"
            places.append(place.clamp(0, max(n - 1, 0)))
        if source.numel() == 0:
            shape = torch.broadcast_shapes(*(p.shape for p in places))
            return torch.zeros(shape, dtype=source.dtype)
        return source[tuple(places)] if places else source


def run_fast(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """The outputs of a graph, in order."""
    sizes = bind_sizes(graph, args)
    tensors: dict[str, Tensor] = {
        i.name: a.detach() for i, a in zip(graph.inputs, args, strict=True) if isinstance(i, Input)
    }
    for node in graph.nodes:
        if isinstance(node, Library):
            results = call_library(node, tensors.__getitem__, sizes, graph.constants)
            tensors.update(zip(node.names, results, strict=True))
            continue
        at = _Evaluator(tensors, sizes)
        shape = [size(e, sizes) for e in node.types[0].shape]
        match node:
            case Compute():
                at.open(node.axes, shape)
                assert node.value.dtype is node.type.dtype, node
                results = [at.value(node.value, None).expand(shape)]
            case View():
                at.open(node.axes, shape)
                wanted = at.value(Load(node.source, node.indices, node.type.dtype), None).expand(shape)
                tensors[node.name] = through_memory(node, tensors[node.source], wanted, sizes)
                continue
            case Scan():
                at.open(node.axes, shape)
                results = _scan(node, at, shape)
            case Scatter():
                results = [_scatter(node, at, shape, [size(e, sizes) for e in node.source_shape])]
            case Reduction():
                results = _reduce(node, at, shape, [size(e, sizes) for e in node.reduce_shape])
        for name, kind, r in zip(node.names, node.types, results, strict=True):
            strides = [size(e, sizes) for e in kind.strides]
            # ATen may look at strides, so values have those of their type.
            tensors[name] = r if 0 in strides else torch.empty_strided(shape, strides, dtype=r.dtype).copy_(r)
    return [collect(o, tensors, sizes) for o in graph.outputs]


def through_memory(node: View, source: Tensor, wanted: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """The view as its strides and offset give it, which must be the elements of its index map."""
    if wanted.numel() == 0 or source.numel() == 0:
        return wanted
    strides = [size(e, sizes) for e in node.type.strides]
    offset = size(node.offset, sizes) + source.storage_offset()
    result = torch.as_strided(source, wanted.shape, strides, offset)
    assert torch.equal(torch.nan_to_num(result.double()), torch.nan_to_num(wanted.double())), (
        f"{node.name}: strides {strides} from {offset} are another view than {node.indices}"
    )
    return result


def _scan(node: Scan, at: _Evaluator, shape: list[int]) -> list[Tensor]:
    dim = node.axes.index(node.scan_axis)
    values = [at.value(v, None).expand(shape).movedim(dim, 0) for v in node.values]
    dtypes = tuple(v.dtype for v in node.values)
    left, right = (tuple(Var(f"{side}{k}", d) for k, d in enumerate(dtypes)) for side in "ab")
    total = [torch.tensor(c.value, dtype=c.dtype.torch).expand(v.shape[1:]) for c, v in
             zip(node.monoid.identity(dtypes), values, strict=True)]  # fmt: skip
    results = [v.clone() for v in values]
    for j in range(shape[dim]):
        at.vars = {v.name: t for v, t in zip(left, total)} | {v.name: s[j] for v, s in zip(right, values)}
        total = [at.value(c, None) for c in node.monoid.combine(left, right)]
        for r, t in zip(results, total, strict=True):
            r[j] = t
    return [r.movedim(0, dim) for r in results]


_COMBINERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda a, b: b, "sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum,
    "any": torch.logical_or, "all": torch.logical_and,
}  # fmt: skip


def _scatter(node: Scatter, at: _Evaluator, shape: list[int], points: list[int]) -> Tensor:
    at.open(node.axes, shape)
    result = at.value(node.initial, None).expand(shape).clone()
    at.open(node.source_axes, points)
    value, *places = (at.value(v, None).expand(points).reshape(-1) for v in node.values[1:])
    combine = _COMBINERS["" if node.monoid is None else node.monoid.name]
    for j, v in enumerate(value):
        place = tuple(int(p[j]) for p in places)
        assert all(0 <= p < n for p, n in zip(place, shape, strict=True)), place
        result[place] = combine(result[place], v)
    return result


def _reduce(node: Reduction, at: _Evaluator, shape: list[int], reduced: list[int]) -> list[Tensor]:
    at.open([*node.axes, *node.reduce_axes], [*shape, *reduced])
    states = [at.value(v, None).expand([*shape, *reduced]).reshape([*shape, -1]) for v in node.values]
    if 0 in reduced or node.monoid.name not in _REDUCERS:
        dtypes = tuple(v.dtype for v in node.values)
        total = [torch.tensor(c.value, dtype=c.dtype.torch).expand(shape) for c in node.monoid.identity(dtypes)]
        left = tuple(Var(f"a{k}", d) for k, d in enumerate(dtypes))
        right = tuple(Var(f"b{k}", d) for k, d in enumerate(dtypes))
        combined = node.monoid.combine(left, right)
        for j in range(0 if 0 in reduced else states[0].shape[-1]):
            at.vars = {v.name: t for v, t in zip(left, total)} | {v.name: s[..., j] for v, s in zip(right, states)}
            total = [at.value(c, None) for c in combined]
        return total
    return [_REDUCERS[node.monoid.name](states[0])]
