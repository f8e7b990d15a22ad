"""How long a warp takes that has a multiprocessor to itself: what it issues, and what it waits for.

In NVIDIA's machine code every instruction says for how long the next one waits, which counters rise until it is done
and which it waits for, so that the code is a schedule of its own and only the latencies are to be filled in. In AMD's
there are counters of what is under way, and instructions that wait for them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir.machine import Machine
from ...ir.pipes import Pipes
from ..machine_code.code import Code, Instruction
from ..machine_code.walk import walk
from .opcodes import by_groups, is_tensor_memory_product, products_of

_MEMORY = frozenset(("LDG", "LD", "ATOM", "ATOMG", "UTMALDG", "UBLKCP"))
_SHARED = frozenset(("LDS", "LDSM", "LDL", "LDC", "ULDC", "LDCU", "ATOMS", "LDTM", "STTM"))
_AMD_WAIT = re.compile(r"\b(vmcnt|lgkmcnt)\((\d+)\)")
_COUNTERS = 6


def warp_clocks(
    code: Code, runs: Sequence[float], machine: Machine, memory_latency: float, tile_products: float = 0.0
) -> float:
    """Clocks from the first instruction of a warp to its last, where nobody else is there.

    ``runs`` is how often each instruction runs, ``memory_latency`` the clocks of a load of global memory, and
    ``tile_products`` the multiply-adds of a product whose size is in a descriptor.
    """
    assert machine.pipes is not None
    warp = _Warp(code, machine.pipes, memory_latency, machine.warp * 4 / machine.pipes.issue, tile_products)
    walk(code, runs, warp)
    # What is stored is on its way when the program ends; what is multiplied has an end.
    return max(warp.clock, warp.tensor)


@dataclass(slots=True)
class _Warp:
    """``slot`` are the clocks of an instruction of a scheduler, of which there are four."""

    code: Code
    pipes: Pipes
    memory: float
    slot: float
    tile_products: float
    clock: float = 0.0
    # When the tensor cores are done with all that they were given.
    tensor: float = 0.0
    # By counter: when each of what it counts is done, in order.
    counters: tuple[deque[float], ...] = field(default_factory=lambda: tuple(deque() for _ in range(_COUNTERS)))
    # When copies to shared memory are there, those of one group, and of all groups before; products by groups of warps;
    # and what barriers in memory wait for.
    copied: float = 0.0
    groups: deque[float] = field(default_factory=deque)
    arrivals: deque[float] = field(default_factory=deque)
    # Of AMD's: loads of global memory, and what is under way in shared memory and the scalar cache.
    loads: deque[float] = field(default_factory=deque)
    near: deque[float] = field(default_factory=deque)

    def mark(self) -> tuple[float, ...]:
        return self.clock, self.tensor

    def later(self, sums: tuple[float, ...]) -> None:
        clock = sums[0]
        self.clock += clock
        self.tensor += clock
        self.copied += clock
        for queue in (*self.counters, self.groups, self.arrivals, self.loads, self.near):
            for n in range(len(queue)):
                queue[n] += clock

    def step(self, k: int) -> None:
        i = self.code.instructions[k]
        if i.opcode[0].isupper():
            self._sass(i)
        else:
            self._amdgcn(i)

    def _until(self, queue: deque[float], left: int = 0) -> None:
        """Wait until no more than ``left`` of a queue are under way."""
        while len(queue) > left:
            self.clock = max(self.clock, queue.popleft())

    def _multiply(self, products: float, grouped: bool) -> float:
        """When a product is done that is given to the tensor cores now. Each scheduler has a quarter of them."""
        rate = (self.pipes.product if grouped else self.pipes.warp_product) / 4
        self.tensor = max(self.tensor, self.clock) + products / rate
        return self.tensor

    def _sass(self, i: Instruction) -> None:
        stem, control = i.opcode.partition(".")[0], i.control
        for counter in control.waits:
            self._until(self.counters[counter])
        if stem == "DEPBAR" and len(i.operands) > 1 and i.operands[0].startswith("SB"):
            self._until(self.counters[int(i.operands[0][2:]) % _COUNTERS], int(i.operands[1], 0))
        elif stem == "WARPGROUP" and "DEPBAR" in i.opcode:
            self._until(self.groups, int(i.operands[1], 0) if len(i.operands) > 1 else 0)
        elif stem == "SYNCS" and "PHASECHK" in i.opcode and self.arrivals:
            self.clock = max(self.clock, self.arrivals.popleft())
        done = self._result(i, stem)
        if control.sets >= 0:
            self.counters[control.sets].append(done)
        if control.frees >= 0:
            self.counters[control.frees].append(self.clock + self.pipes.shared_latency)
        self.clock += max(control.stall, self.slot)
        if stem == "BAR":
            self.clock += self.pipes.barrier

    def _result(self, i: Instruction, stem: str) -> float:
        """When the result of an instruction is there that begins now."""
        products = self.tile_products / 4 if is_tensor_memory_product(i.opcode) else products_of(i.opcode)
        if products:
            # An instruction of a warp begins when those before it have left the pipe.
            grouped = by_groups(i.opcode)
            if not grouped:
                self.clock = max(self.clock, self.tensor)
            done = self._multiply(products, grouped)
            if any(o.startswith("gsb") for o in i.operands):
                self.groups.append(done)
            return done
        if stem == "LDGSTS":
            self.copied = max(self.copied, self.clock + self.memory)
            return self.copied
        if stem == "LDGDEPBAR":
            return self.copied
        if stem == "UTCBAR":
            self.arrivals.append(self.tensor)
        elif stem == "SYNCS" and "ARRIVE" in i.opcode and "TRANS64" in i.opcode:
            self.arrivals.append(self.clock + self.memory)
        if stem in _MEMORY:
            return self.clock + self.memory
        return self.clock + (self.pipes.shared_latency if stem in _SHARED else self.pipes.special_latency)

    def _amdgcn(self, i: Instruction) -> None:
        opcode = i.opcode
        if opcode == "s_waitcnt":
            for counter, left in _AMD_WAIT.findall(" ".join(i.operands)):
                self._until(self.loads if counter == "vmcnt" else self.near, int(left))
        elif opcode.startswith(("global_load", "buffer_load", "flat_load")):
            self.loads.append(self.clock + self.memory)
        elif opcode.startswith(("global_store", "buffer_store", "flat_store")):
            self.loads.append(self.clock)
        elif opcode.startswith(("ds_", "s_load", "s_buffer_load")):
            self.near.append(self.clock + self.pipes.shared_latency)
        elif opcode == "s_barrier":
            self.clock += self.pipes.barrier
        elif products := products_of(opcode):
            self.clock = max(self.clock, self.tensor)
            self._multiply(products, grouped=False)
        self.clock += self.slot
