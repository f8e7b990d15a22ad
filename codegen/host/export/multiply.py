"""Products that an exported program leaves to a library: calls of ops as steps that know where matrices lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.graph.graph import Library, Node, Ref, TensorType
from ....ir.graph.products import PLAIN_PRODUCTS, is_plain_product, is_turned
from ....ir.graph.rename import Naming
from ..steps.program import HostProgram
from ..steps.step import Allocate, CallLibrary, Facts, HostStep, Repeat
from .results import CopyOver

_FUNCTIONS = {DType.FLOAT32: "sgemm", DType.FLOAT64: "dgemm"}


@dataclass(frozen=True, slots=True)
class Multiply(HostStep):
    """``target`` becomes ``alpha * a @ b + beta * target``; ``types`` are those of the three, in this order: a, b,
    target."""

    a: str
    b: str
    target: str
    types: tuple[TensorType, TensorType, TensorType]
    alpha: float
    beta: float
    comment: str = ""

    @property
    def function(self) -> str:
        """The function of CBLAS that does it, without its prefix."""
        return _FUNCTIONS[self.types[2].dtype]

    @property
    def numbers(self) -> tuple[sympy.Expr | int, ...]:
        """What the function takes behind the three addresses (``codegen/export/products.py``)."""
        a, b, out = self.types
        (m, k), n = a.shape[-2:], out.shape[-1]
        turned = [bool(is_turned(t)) for t in (a, b)]
        steps = [_row_step(t, flag) for t, flag in zip(self.types, (*turned, False), strict=True)]
        count = out.shape[0] if len(out.shape) == 3 else sympy.S.One
        further = [t.strides[0] if len(t.shape) == 3 else sympy.S.Zero for t in self.types]
        factors = [struct.unpack("<q", struct.pack("<d", f))[0] for f in (self.alpha, self.beta)]
        return (m, n, k, *steps, *map(int, turned), count, *further, *factors)

    def told(self) -> Facts:
        return Facts(
            reads=(self.a, self.b, self.target), sizes=tuple(e for e in self.numbers if isinstance(e, sympy.Expr))
        )

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, a=name(self.a), b=name(self.b), target=name(self.target))


def _row_step(kind: TensorType, turned: bool) -> sympy.Expr:
    """How far rows are apart, or columns where these lie in a row; never less than a row has elements, or one."""
    lines, extent = (kind.shape[-1], kind.shape[-2]) if turned else (kind.shape[-2], kind.shape[-1])
    step = kind.strides[-1] if turned else kind.strides[-2]
    return sympy.Max(extent if lines == 1 else step, 1)


def multiplied(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a node is a product that a library of the BLAS kind computes."""
    if not isinstance(node, Library) or node.target not in PLAIN_PRODUCTS or node.types[0] is None:
        return False
    adds = PLAIN_PRODUCTS[node.target]
    given = node.args[: 2 + adds]
    if len(given) < 2 + adds or not all(isinstance(a, Ref) for a in given):
        return False
    if any(not isinstance(v, (int, float)) for _, v in node.kwargs) or len(node.args) > len(given):
        return False
    a, b = (types[r.name] for r in given[-2:])
    return is_plain_product(node.target, a, b, node.types[0])


def write_products(program: HostProgram, types: Mapping[str, TensorType]) -> HostProgram:
    """The program with calls of ops that are products of plain matrices as steps of their own."""

    def written(step: HostStep) -> list[HostStep]:
        match step:
            case Repeat():
                return [replace(step, steps=tuple(s for inner in step.steps for s in written(inner)))]
            case CallLibrary(node) if not step.over and multiplied(node, types):
                return _written(node, types, step.comment)
        return [step]

    return replace(program, steps=tuple(s for step in program.steps for s in written(step)))


def _written(node: Library, types: Mapping[str, TensorType], comment: str) -> list[HostStep]:
    kind, name = types[node.names[0]], node.names[0]
    factors = dict(node.kwargs)
    *added, a, b = (r.name for r in node.args)
    both = types[a], types[b], kind
    alpha, beta = float(factors.get("alpha", 1)), float(factors.get("beta", 1))
    if not added or beta == 0:  # what is not read may be anything, NaN too
        return [Allocate(name, kind), Multiply(a, b, name, both, alpha, 0.0, comment)]
    first = f"{name}_begun"
    wide = _expanded(types[added[0]], kind)
    return [
        Allocate(first, kind), CopyOver(name, first, added[0], kind, wide),
        Multiply(a, b, name, both, alpha, beta, comment),
    ]  # fmt: skip


def _expanded(kind: TensorType, to: TensorType) -> TensorType:
    """The type of a tensor that is read as one of another shape, as torch broadcasts it."""
    missing = len(to.shape) - len(kind.shape)
    strides = [sympy.S.Zero] * missing
    for extent, stride, wanted in zip(kind.shape, kind.strides, to.shape[missing:], strict=True):
        strides.append(sympy.S.Zero if extent == 1 and wanted != 1 else stride)
    return replace(kind, shape=to.shape, strides=tuple(strides))
