"""Blocks of PTX that kernels hold, run by NumPy: registers of 32 bits, of as many lanes as a tile has groups of
elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

_HALVES = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
_SIZE = 4
_STATEMENT = re.compile(r"([\w.]+)\s+(.*)")


def run_assembly(text: str, inputs: Sequence[Any], results: int, itemsize: int, pack: int) -> Any:
    """The elements, as unsigned numbers of ``itemsize`` bytes, that a block of instructions makes of arrays of one
    shape, ``pack`` neighbours of each at a time. ``$0`` and so on are ``results`` registers, then those of the inputs.

    Raises: NotImplementedError for instructions other than those that the compiler writes.
    """
    shape, count = inputs[0].shape, inputs[0].size
    groups = -(-count // pack)
    registers: dict[str, Any] = {f"${k}": np.zeros(groups, np.uint32) for k in range(results)}
    place = results
    for array in inputs:
        padded = np.zeros(groups * pack, f"u{array.itemsize}")
        padded[:count] = np.ascontiguousarray(array).reshape(-1).view(padded.dtype)
        words = padded.view(np.uint32).reshape(groups, -1)
        for k in range(words.shape[1]):
            registers[f"${place}"] = words[:, k].copy()
            place += 1
    for statement in filter(None, (s.strip(" {}\n") for s in text.split(";"))):
        _run(statement, registers)
    made = np.stack([registers[f"${k}"] for k in range(results)], axis=1)
    return made.view(f"u{itemsize}").reshape(-1)[:count].reshape(shape)


def _run(statement: str, registers: dict[str, Any]) -> None:
    found = _STATEMENT.fullmatch(statement)
    opcode, operands = (found[1], [o.strip() for o in found[2].split(",")]) if found else (statement, [])
    if opcode == ".reg":
        return
    target, *given = operands
    values = [_value(o, registers) for o in given]
    match opcode.split("."):
        case ["mov", "b32"]:
            made = values[0]
        case ["shr", "b32"]:
            made = values[0] >> values[1]
        case ["shl", "b32"]:
            made = values[0] << values[1]
        case ["and", "b32"]:
            made = values[0] & values[1]
        case ["prmt", "b32"]:
            made = _permuted(*values)
        case ["lop3", "b32"]:
            made = _logic(values[0], values[1], values[2], int(given[3], 0))
        case ["fma", "rn", kind] if kind in _HALVES:
            made = _fused(_HALVES[kind], *values)
        case _:
            raise NotImplementedError(f"assembly that the interpreter does not know: {statement}")
    lanes = registers["$0"].shape
    registers[target] = np.broadcast_to(np.asarray(made, np.uint32), lanes).copy()


def _value(operand: str, registers: Mapping[str, Any]) -> Any:
    return registers[operand] if operand in registers else np.uint32(int(operand, 0))


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes of the eight of two registers, or eight times the sign of one of them."""
    both = np.asarray(a, np.uint64) | np.asarray(b, np.uint64) << np.uint64(32)
    made = np.zeros_like(both)
    for k in range(_SIZE):
        of = int(selector) >> 4 * k
        byte = both >> np.uint64(8 * (of & 7)) & np.uint64(0xFF)
        made |= (byte if not of & 8 else (byte >> np.uint64(7)) * np.uint64(0xFF)) << np.uint64(8 * k)
    return made.astype(np.uint32)


def _logic(a: Any, b: Any, c: Any, table: int) -> Any:
    """Bit by bit what the table says of the three bits, whose number a has the highest bit of."""
    made = np.uint32(0)
    for k in range(8):
        if table >> k & 1:
            bits = [x if k >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            made = made | (bits[0] & bits[1] & bits[2])
    return made


def _fused(kind: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of both halves, rounded once. Float64 holds the product, and where it does not hold the sum, that
    is further from a tie than what it cuts off."""
    x, y, z = (np.atleast_1d(np.asarray(v, np.uint32)).view(kind).astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        return (x * y + z).astype(kind).view(np.uint32)
