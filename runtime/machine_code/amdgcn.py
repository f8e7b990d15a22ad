"""The machine code of AMD's GPUs, read from the assembly text that Triton gives."""

from __future__ import annotations

import re

from ..triton.triton_stages import KERNEL_FILE
from .code import Code, Flow, Instruction

_LOC = re.compile(r"^\s*\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)")
_FILE = re.compile(r'^\s*\.file\s+(?P<number>\d+)\s+(?:"[^"]*"\s+)?"(?P<file>[^"]*)"')
_LABEL = re.compile(r"^(?P<label>[.$\w]+):")
_INSTRUCTION = re.compile(r"^\s+(?P<opcode>[a-z]\w+)(?:\s+(?P<operands>[^;]*))?(?:;.*)?$")
# What the vector units and the memory pipes behind them take; scalar instructions are issued beside those.
_ISSUES = ("v_", "global_", "flat_", "buffer_", "ds_", "scratch_")


def read_amdgcn(text: str, name: str) -> Code:
    """The code of the kernel ``name``; nothing where the text has none of that name."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    ours: set[str] = set()
    line, inside = 0, False
    for row in text.splitlines():
        if match := _FILE.match(row):
            ours |= {match["number"]} if match["file"].startswith(KERNEL_FILE) else set()
        elif match := _LOC.match(row):
            line = int(match["line"]) if match["file"] in ours else 0
        elif match := _LABEL.match(row):
            inside |= match["label"] == name
            if match["label"].startswith(".Lfunc_end"):
                inside = False
            elif inside:
                labels[match["label"]] = len(instructions)
        elif inside and (match := _INSTRUCTION.match(row)):
            operands = tuple(o.strip() for o in (match["operands"] or "").split(",") if o.strip())
            flow = _flow(match["opcode"])
            target = operands[0] if flow in (Flow.BRANCH, Flow.JUMP) and operands else ""
            issues = match["opcode"].startswith(_ISSUES)
            instructions.append(Instruction(match["opcode"], operands, "", line, flow, target, issues))
    return Code(tuple(instructions), labels)


def _flow(opcode: str) -> Flow:
    if opcode.startswith("s_cbranch"):
        return Flow.BRANCH
    return {
        "s_branch": Flow.JUMP, "s_endpgm": Flow.END, "s_setpc_b64": Flow.END, "s_swappc_b64": Flow.CALL,
    }.get(opcode, Flow.ON)  # fmt: skip
