"""What an emitter gives: the text of one kernel, and how to call it."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ..ir.errors import MlcError
from ..ir.loops import Buffer

# Bytes of which an address is a multiple unless a buffer or a call says otherwise, and by which GPU code is chosen.
ALIGNMENT = 16


class EmitError(MlcError):
    """A scheduled nest holds something that the emitter of its target has no code for."""


class LibraryOnlyError(EmitError):
    """What it holds is meant to be a library's: the language of the target lacks the type, or converts it otherwise."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel as text.

    ``params`` are the pointer arguments in call order (inputs, then outputs) and ``symbols`` the sizes (int64) after
    them. ``grid`` is the number of GPU programs by dimension, in size symbols; ``meta`` what else the compiler or
    launcher needs. The text depends on the nest, the target and the emitter's options alone, so it is a cache key.
    """

    name: str
    language: str
    text: str
    params: tuple[Buffer, ...]
    symbols: tuple[str, ...]
    grid: tuple[sympy.Expr, ...] = ()
    meta: tuple[tuple[str, int | str | bool], ...] = ()

    def option(self, key: str, default: int | str | bool | None = None) -> int | str | bool | None:
        """The entry ``key`` of ``meta``."""
        return dict(self.meta).get(key, default)
