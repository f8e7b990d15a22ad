"""Arguments of what is called by hand, a kernel or a whole graph: checked against parameters, and the sizes that they
tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.errors import MlcError
from ...ir.expr.symbols import SymbolTable
from ...ir.nest.loops import Buffer

Tensor: TypeAlias = torch.Tensor
Sizes: TypeAlias = dict[sympy.Symbol, sympy.Integer]


class CallError(MlcError, TypeError):
    """Arguments of a kernel or graph do not fit its parameters; the text names the argument and what was wanted."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that ``name`` takes, in order, and the sizes that they tell; others are given by name."""

    name: str
    inputs: tuple[Buffer, ...]
    symbols: SymbolTable

    def count(self, inputs: Sequence[object]) -> None:
        """Raises CallError where there are more or fewer arguments than parameters."""
        if len(inputs) != len(self.inputs):
            names = ", ".join(map(type_text, self.inputs)) or "none"
            raise CallError(f"{self.name} takes {len(self.inputs)} inputs ({names}), {len(inputs)} were given")

    def check(self, b: Buffer, t: object, device: torch.device, why: str = "") -> None:
        """Raises CallError for an argument that is no tensor of the parameter's dtype on a device (any of its kind
        where it has no index; ``why`` says why there), or has no memory."""
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
            raise CallError(f"{self.name}: {b.name} is a strided tensor, not {type(t).__name__}")
        if t.dtype is not b.dtype.torch:
            raise CallError(f"{self.name}: {b.name} is of {b.dtype.torch}, the argument of {t.dtype}")
        if t.device.type != device.type or device.index not in (None, t.device.index):
            raise CallError(f"{self.name}: {b.name} has to be on {device}{why}; the argument is on {t.device}")
        if not _has_memory(t):
            raise CallError(f"{self.name}: the argument for {b.name} has no memory, or not all that it shows")

    def sizes(self, inputs: Sequence[Tensor], given: Mapping[str, int]) -> Sizes:
        """The value of every size. Raises CallError where shapes or strides are not those of the parameters, where
        nothing tells a size, or where it is none that code was made for."""
        known = self._given(given)
        facts = [f for b, t in zip(self.inputs, inputs, strict=True) for f in self._facts(b, t)]
        _bind(known, [(expr, value) for _, expr, value in facts])
        for where, expr, value in facts:
            wanted = expr.xreplace(known)
            if wanted.is_Integer and int(wanted) != value:
                of = f" = {wanted}" if expr.free_symbols else ""
                raise CallError(f"{self.name}: {where} has to be {expr}{of}, the argument's is {value}")
        for s in self.symbols.sizes:
            if s.symbol not in known:
                raise CallError(f"{self.name}: no shape of an input tells {s.symbol}; pass it by name, {s.symbol}=…")
            value = int(known[s.symbol])
            if value < s.lower or (s.upper is not None and value > s.upper) or value % s.divisor:
                told = f"from {s.lower} to {s.upper if s.upper is not None else 'any'}, divisible by {s.divisor}"
                raise CallError(f"{self.name}: {s.symbol} is {value}; the code is for sizes {told}")
        return known

    def _given(self, sizes: Mapping[str, int]) -> Sizes:
        symbols = {s.name: s for s in self.symbols.symbols}
        for name in sizes:
            if name not in symbols:
                raise CallError(f"{self.name} has no size {name}; its sizes are {', '.join(symbols) or 'none'}")
            if not isinstance(sizes[name], int):
                raise CallError(f"{self.name}: {name} is a whole number, not {sizes[name]!r}")
        return {symbols[name]: sympy.Integer(value) for name, value in sizes.items()}

    def _facts(self, b: Buffer, t: Tensor) -> list[tuple[str, sympy.Expr, int]]:
        """What has to hold of an argument: dimensions, and the strides of those that have several elements."""
        if t.dim() != len(b.shape):
            raise CallError(f"{self.name}: {type_text(b)} has {len(b.shape)} dimensions, the argument {t.dim()}")
        facts = [(f"dimension {d} of {b.name}", e, n) for d, (e, n) in enumerate(zip(b.shape, t.shape))]
        if t.numel():
            steps = zip(b.strides, t.stride(), t.shape)
            facts += [(f"stride {d} of {b.name}", e, s) for d, (e, s, n) in enumerate(steps) if n > 1]
        return facts


def numbers(exprs: Sequence[sympy.Expr], known: Sizes) -> tuple[int, ...]:
    """Expressions at known sizes."""
    return tuple(int(e.xreplace(known)) for e in exprs)


def type_text(b: Buffer) -> str:
    """A parameter with its type."""
    return f"{b.name}: {b.dtype.value}[{', '.join(map(str, b.shape))}]"


def without_bits(t: Tensor) -> Tensor:
    """What is negative or conjugate by a bit alone (``x.conj().imag``) as memory that is, in the same layout."""
    t = t.resolve_conj() if t.is_conj() else t
    if not t.is_neg():
        return t
    return (-torch._neg_view(t).as_strided((_span(t),), (1,))).as_strided(t.shape, t.stride(), 0)


def _span(t: Tensor) -> int:
    """Elements from the first to the last that a tensor has."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0


def _has_memory(t: Tensor) -> bool:
    """Whether all elements are there: storages can be freed, and fakes and wrappers only say how large theirs are."""
    if not t.numel():
        return True
    room = t.untyped_storage().nbytes() - t.itemsize * t.storage_offset()
    return not isinstance(t, FakeTensor) and room >= t.itemsize * _span(t) and t.data_ptr() != 0


def _bind(known: Sizes, facts: Sequence[tuple[sympy.Expr, int]]) -> None:
    """Sizes from expressions whose values are known, those that are linear in one size that is still open."""
    progress = True
    while progress:
        progress = False
        for expr, value in facts:
            rest = expr.xreplace(known)
            if len(rest.free_symbols) != 1:
                continue
            (symbol,) = rest.free_symbols
            slope = sympy.expand(rest).coeff(symbol)
            at_zero = sympy.expand(rest - slope * symbol)
            if not (slope.is_Integer and slope != 0 and at_zero.is_Integer) or (value - at_zero) % slope:
                continue
            known[symbol] = (value - at_zero) // slope
            progress = True
