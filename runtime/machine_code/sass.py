"""The machine code of NVIDIA's GPUs (SASS), read from a cubin by the disassembler that Triton brings along."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...ir.errors import MlcError
from ..triton.triton_stages import KERNEL_FILE
from .code import Code, Control, Flow, Instruction

_LINE = re.compile(r'^\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_LABEL = re.compile(r"^(?P<label>[.$\w]+):\s*$")
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
# The upper half of an instruction of 128 bits, on a line of its own.
_UPPER = re.compile(r"^\s*/\* 0x(?P<bits>[0-9a-f]{16}) \*/\s*$")
# What the disassembler says about an instruction behind its operands: "?WAIT4_END_GROUP".
_REMARK = re.compile(r"\s+\?\w+\s*$")
_TARGET = re.compile(r"`\((?P<label>[^)]+)\)")
_SECONDS = 60
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class DisassemblyError(MlcError):
    """There is no disassembler here, or it refused a kernel."""


@cache
def disassembler() -> Path | None:
    """The program ``nvdisasm`` of the Triton that is installed, None where it has none. Triton is not imported."""
    spec = importlib.util.find_spec("triton")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(place) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if path.is_file():
            return path
    return None


def access_bytes(opcode: str) -> int:
    """The bytes that a lane of an access of memory takes: 16 for "LDG.E.128"; 4 where the instruction does not say."""
    return next((_WIDTHS[p] for p in opcode.split(".") if p in _WIDTHS), 4)


def read_sass(cubin: bytes, name: str) -> Code:
    """The code of the kernel ``name``, without the functions that it calls. Raises DisassemblyError."""
    program = disassembler()
    if program is None:
        raise DisassemblyError("the installed Triton brings no nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [str(program), "-g", "-c", "-hex", file.name], capture_output=True, text=True, timeout=_SECONDS,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DisassemblyError(f"{name}: nvdisasm does not run: {error}") from error
    if done.returncode:
        raise DisassemblyError(f"{name}: nvdisasm says: {done.stderr.strip()}")
    return parse_sass(done.stdout, name)


def parse_sass(text: str, name: str) -> Code:
    """The code of a kernel in what ``nvdisasm -g -c -hex`` prints; without ``-hex`` no instruction is known to wait.
    Raises DisassemblyError where it is not there."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line, inside = 0, False
    for row in text.splitlines():
        if match := _LABEL.match(row):
            label = match["label"]
            if inside and label.startswith("$") and not label.startswith(f"${name}$"):
                break  # functions that the kernel calls stand behind it
            inside |= label in (f".text.{name}", name)
            if inside:
                labels[label] = len(instructions)
        elif match := _LINE.match(row):
            line = int(match["line"]) if match["file"].startswith(KERNEL_FILE) else 0
        elif inside and (match := _INSTRUCTION.match(row)):
            instructions.append(_instruction(match, line))
        elif inside and instructions and (match := _UPPER.match(row)):
            instructions[-1] = replace(instructions[-1], control=control_of(int(match["bits"], 16)))
    if not instructions:
        raise DisassemblyError(f"{name}: no code of that name in what nvdisasm prints")
    return Code(tuple(instructions), labels)


def control_of(upper: int) -> Control:
    """What the upper 64 bits of an instruction tell the scheduler (since Volta; Jia et al. 2018, arXiv:1804.06826)."""
    sets, frees, waits = upper >> 46 & 7, upper >> 49 & 7, upper >> 52 & 63
    return Control(
        upper >> 41 & 15, sets if sets < 6 else -1, frees if frees < 6 else -1,
        tuple(k for k in range(6) if waits >> k & 1),
    )  # fmt: skip


def _instruction(match: re.Match[str], line: int) -> Instruction:
    guard, opcode = match["guard"] or "", match["opcode"]
    given = _REMARK.sub("", match["operands"])
    operands = tuple(o.strip() for o in given.split(",")) if given.strip() else ()
    target = t["label"] if (t := _TARGET.search(given)) else ""
    return Instruction(opcode, operands, guard, line, _flow(opcode, guard, target, operands), target)


def _flow(opcode: str, guard: str, target: str, operands: tuple[str, ...]) -> Flow:
    stem = opcode.partition(".")[0]
    # A branch may test a uniform predicate that is its first operand.
    conditional = bool(guard) or (len(operands) > 1 and operands[0].lstrip("!").startswith(("P", "UP")))
    # The assembler also calls labels of the kernel's own, from where nothing returns.
    if stem in ("BRA", "JMP", "CALL") and target.startswith(".L"):
        return Flow.BRANCH if conditional else Flow.JUMP
    if stem in ("EXIT", "RET", "BRX", "JMX"):
        return Flow.PARTIAL_END if guard else Flow.END
    return Flow.CALL if stem == "CALL" else Flow.ON
