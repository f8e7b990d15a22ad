"""What an emitter gives: the text of one kernel, and how to call it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from ..ir.errors import MlcError
from ..ir.nest.hints import foreign
from ..ir.nest.loops import Block, Buffer, LoopNest, walk_nodes

# Bytes of which an address is a multiple unless a buffer or a call says otherwise, and by which GPU code is chosen.
ALIGNMENT = 16
# The greatest index of 32 bits.
INDEX_MAX = (1 << 31) - 1
# A line of the text of a GPU kernel that gives its indices their type, in the two forms of the text.
NARROW, WIDE = (f"INDEX = tl.constexpr(tl.int{bits})\n" for bits in (32, 64))


class EmitError(MlcError):
    """A scheduled nest holds something that the emitter of its target has no code for."""


class LibraryOnlyError(EmitError):
    """What it holds is meant to be a library's: the language of the target lacks the type, or converts it otherwise."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel as text.

    ``params`` are the pointer arguments in call order (inputs, then outputs) and ``symbols`` the sizes (int64) after
    them. ``grid`` is the number of GPU programs by dimension, in size symbols; ``meta`` what else the compiler or
    launcher needs. ``reach``, in size symbols, is given where the text has another form (``wide_source``): no index of
    the kernel exceeds it, so that this form is right where it is at most ``INDEX_MAX``. The text depends on the nest,
    the target and the emitter's options alone, so it is a cache key.
    """

    name: str
    language: str
    text: str
    params: tuple[Buffer, ...]
    symbols: tuple[str, ...]
    grid: tuple[sympy.Expr, ...] = ()
    meta: tuple[tuple[str, int | str | bool], ...] = ()
    reach: sympy.Expr | None = None

    def option(self, key: str, default: int | str | bool | None = None) -> int | str | bool | None:
        """The entry ``key`` of ``meta``."""
        return dict(self.meta).get(key, default)


def refuse_foreign(nest: LoopNest, target: str) -> None:
    """Refuse hints of which a kernel for "cpu" or "gpu" would take no notice. Raises EmitError."""
    for node in (nest, *(n for n, _ in walk_nodes(nest.body))):
        for key in foreign(node.annotations, target):
            where = node.name if isinstance(node, (LoopNest, Block)) else node.var.name
            raise EmitError(f"{nest.name}: {where} has the hint {key!r}, which means nothing to a {target.upper()}")


def wide_source(source: KernelSource) -> KernelSource:
    """A kernel that has a ``reach`` with indices of 64 bits, which are right at all sizes."""
    meta = tuple((k, "i64" if k == "index" else v) for k, v in source.meta)
    return replace(source, text=source.text.replace(NARROW, WIDE, 1), meta=meta, reach=None)
