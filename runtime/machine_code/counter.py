"""Loops of machine code whose counter says how often they run: it begins with a number, takes steps of one number, and
is compared with a third. Compilers write several iterations of a text's loop as one, which its steps tell."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence

from .code import Code, Flow, Instruction, MachineLoop

_NUMBER = re.compile(r"^-?(?:0x[0-9a-f]+|\d+)$")
_ZERO = ("RZ", "URZ", "SRZ", "-RZ")
_ADDS = ("IADD3", "VIADD", "UIADD3", "IADD", "s_add_i32", "s_add_u32", "s_addk_i32", "s_add_co_u32", "s_add_co_i32")
_SETS = ("MOV", "UMOV", "CS2R", "IMAD.MOV", "HFMA2", "UIMAD", "s_mov_b32", "s_mov_b64", "s_movk_i32")
_COMPARES = ("ISETP", "UISETP", "s_cmp", "s_cmpk")


def constant_runs(code: Code, loop: MachineLoop) -> int | None:
    """How often the body of a loop runs each time it is entered, None where numbers alone do not tell."""
    for left in sorted(_exits(code, loop)):
        compared = _comparison(code, loop, left)
        if compared is None:
            continue
        counter, bound, inclusive = compared
        step, first = _step(code, loop, counter), _start(code, loop, counter)
        if step and first is not None and (distance := (bound - first) / step) > 0:
            return max(math.floor(distance) + 1 if inclusive else math.ceil(distance), 1)
    return None


def _exits(code: Code, loop: MachineLoop) -> Iterator[int]:
    """The branches by which a loop is left."""
    for k in loop.body:
        i = code.instructions[k]
        if i.flow is Flow.BRANCH and (k + 1 not in loop.body or code.labels.get(i.target) not in loop.body):
            yield k


def _comparison(code: Code, loop: MachineLoop, branch: int) -> tuple[str, int, bool] | None:
    """The counter, the number it is compared with, and whether the loop goes on where they are equal."""
    i = code.instructions[branch]
    asked = i.predicate.lstrip("!") or (i.operands[0].lstrip("!") if len(i.operands) > 1 else "scc")
    for k in sorted((k for k in loop.body if k < branch), reverse=True):
        i = code.instructions[k]
        operands = [_plain(o) for o in i.operands]
        if asked != "scc" and asked not in operands[:2]:
            continue  # nothing to do with it
        if ".EX" in i.opcode:  # the upper half of the same comparison
            if any(_number(o) for o in operands):
                return None  # of a counter of 64 bits, of which the lower half wraps
            continue
        if i.opcode.startswith("PLOP3"):
            asked = next((o for o in operands if re.fullmatch(r"UP\d", o)), asked)
        elif i.opcode.startswith(_COMPARES):
            compared = [o for o in operands if o not in ("PT", "UPT", asked)]
            bound = _number(compared[1]) if len(compared) > 1 else None
            return None if bound is None else (compared[0], bound, ".LE" in i.opcode or "_le_" in i.opcode)
        elif asked != "scc":
            return None
    return None


def _step(code: Code, loop: MachineLoop, counter: str) -> int | None:
    """What is added to the counter in the loop, None unless that is one number in one place."""
    found = []
    for k in loop.body:
        i = code.instructions[k]
        if counter not in _written(i):
            continue
        rest = [o for o in map(_plain, i.operands[1:]) if o not in (*_ZERO, "PT", "UPT", "!PT", "!UPT")]
        numbers = [n for o in rest if (n := _number(o)) is not None]
        # s_addk_i32 has its counter but once.
        has = counter in rest or i.opcode.startswith("s_addk")
        if not i.opcode.startswith(_ADDS) or ".X" in i.opcode or not has or len(numbers) != 1:
            return None
        found.append(numbers[0])
    return found[0] if len(found) == 1 else None


def _start(code: Code, loop: MachineLoop, counter: str) -> int | None:
    """What the counter is when the loop is entered, where the last instruction that sets it says so."""
    for k in range(loop.first - 1, -1, -1):
        i = code.instructions[k]
        if counter in _written(i):
            given = [_plain(o) for o in i.operands[1:]]
            if i.opcode.startswith("HFMA2"):
                return _packed(given)
            if i.opcode.startswith(_SETS) and all(o in _ZERO or _number(o) is not None for o in given):
                numbers = [n for o in given if (n := _number(o)) is not None]
                return _signed(max(numbers, key=abs, default=0))
            return None
    return None


def _signed(bits: int) -> int:
    """A register's number: counters that begin below zero are written as 32 bits without a sign."""
    return bits - (1 << 32) if bits >> 31 == 1 else bits


def _packed(given: Sequence[str]) -> int | None:
    """The bits of two halves that are added to products of zero, by which the compiler sets a register to a number."""
    if len(given) != 4 or any(o not in _ZERO for o in given[:2]):
        return None
    try:
        high, low = (struct.pack(">e", 0.0 if o in _ZERO else float(o)) for o in given[2:])
    except (ValueError, OverflowError):
        return None
    return int.from_bytes(high + low, "big", signed=True)


def _written(i: Instruction) -> Iterator[str]:
    """The registers that an instruction sets, as far as they could be a counter."""
    if not i.operands or i.opcode.startswith(("s_cmp", "v_cmp", "STG", "STS", "global_store", "ds_write")):
        return
    first = _plain(i.operands[0])
    yield first
    if match := re.fullmatch(r"([vs])\[(\d+):(\d+)\]", first):
        yield from (f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1))
    elif (match := re.fullmatch(r"(U?R)(\d+)", first)) and (".64" in i.opcode or i.opcode.startswith("CS2R")):
        yield f"{match[1]}{int(match[2]) + 1}"


def _plain(operand: str) -> str:
    return operand.replace(".reuse", "").strip()


def _number(operand: str) -> int | None:
    if not _NUMBER.match(operand):
        return None
    value = int(operand, 0)
    return value
