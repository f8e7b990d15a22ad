"""A kernel over a table: one launch does the work of many calls of one function.

It takes two pointers. ``table`` has a row of int64 for each call: the addresses of its tensors, then its sizes.
``programs`` has four int32 for each program: the row, and the program's place in the grid of that call.
"""

from __future__ import annotations

from ...ir.nest.loops import LoopNest
from .types import Types

PARAMETERS = ("table_ptr", "programs_ptr")
# Lines of the text: elements by size that 16 bytes hold. Where some address is no multiple of 16 bytes, the variant of
# the kernel for that says 1.
ALIGNED = "".join(f"ALIGN_{n} = tl.constexpr({16 // n})\n" for n in (1, 2, 4, 8))
UNALIGNED = "".join(f"ALIGN_{n} = tl.constexpr(1)\n" for n in (1, 2, 4, 8))


def table_head(nest: LoopNest, axes: str, integer: str, types: Types) -> list[str]:
    """The lines that read a program's place, addresses and sizes; ``axes`` are those of the grid that it uses, and
    ``integer`` is the type of indices, ``types`` those of elements."""
    width = len(nest.params) + len(nest.symbols.symbols)
    lines = ["place_ = programs_ptr + tl.program_id(0).to(tl.int64) * 4"]
    lines.append("base_ = table_ptr.to(tl.int64)")
    lines.append(f"row_ = table_ptr + tl.load(place_).to(tl.int64) * {width}")
    for axis in axes:
        cast = "" if integer == "tl.int32" else f".to({integer})"
        lines.append(f"pid_{axis} = tl.load(place_ + {'xyz'.index(axis) + 1}){cast}")
    for k, b in enumerate(nest.params):
        # As an offset from the table, for what Triton knows of a number's divisors is lost when it becomes a pointer.
        offset = f"(tl.load(row_ + {k}) - base_) // {b.dtype.itemsize}"
        if (b.align == 0 or b.align % 16 == 0) and b.dtype.itemsize < 16:
            offset = f"tl.multiple_of({offset}, ALIGN_{b.dtype.itemsize})"
        lines.append(f"{b.name}_ptr = table_ptr.to(tl.pointer_type({types.text(b.dtype)})) + {offset}")
    for k, s in enumerate(nest.symbols.sizes, len(nest.params)):
        size = f"tl.load(row_ + {k})" + ("" if integer == "tl.int64" else f".to({integer})")
        power = min(s.divisor & -s.divisor, 16)
        lines.append(f"{s.symbol.name} = " + (f"tl.multiple_of({size}, {power})" if power > 1 else size))
    return lines
