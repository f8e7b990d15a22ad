"""Checks of code for a GPU that is not here: it is compiled, its text runs in Triton's interpreter, and its machine
code is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec

from ...ir.target import TargetError
from ...runtime.counters import counters
from ...runtime.targets import named_target
from ..explaining.explain import explain
from ..verify.verify_graph import WrongResultError
from .finding import Row, row
from .programs import PROGRAMS


def target_known(target: str) -> Iterator[Row]:
    """Whether code can be made for it."""
    if find_spec("triton") is None:
        yield row("not done", "Triton is not installed, so nothing is compiled for a GPU", "pip install triton")
        return
    try:
        known = named_target(target)
    except TargetError as error:
        yield row("failed", str(error), "name another, such as --target cuda:sm_90 or hip:gfx942")
        return
    machine = known.machine
    yield row("ok", f"{known} ({machine.part}, {known.cores} multiprocessors): none is here, so nothing is launched")


def program(name: str, target: str) -> Iterator[Row]:
    """Compile a program, interpret its kernels, and read their machine code."""
    if find_spec("triton") is None:
        return
    try:
        named_target(target)
    except TargetError:
        return  # told already
    p, before, begin = PROGRAMS[name], counters.snapshot(), time.perf_counter()
    try:
        report = explain(
            p.function, *p.inputs("cpu"), training=p.training, dynamic=bool(p.first_sizes), target=target,
            options={"cache": False, "verify": 1, "compile_workers": 0},
        )  # fmt: skip
    except WrongResultError as error:
        yield row("failed", " ".join(str(error).split()), "report it with this line")
        return
    seconds, since = time.perf_counter() - begin, counters.since(before)
    kernels = report.kernels
    broken = [k for k in kernels if k.error or k.resources is None]
    if broken:
        yield row("failed", f"{broken[0].name} does not compile: {broken[0].error}", "report it with this line")
        return
    if not kernels:
        yield row("failed", "no kernel was made of it", "report it with this line")
        return
    spills = sum(k.resources.spills for k in kernels if k.resources is not None)
    slots = max((s for k in kernels if (s := k.slots_a_byte) is not None), default=None)
    verified, unverified = since.get("kernels_verified", 0), since.get("kernels_unverified", 0)
    told = f"{len(kernels)} compiled, {verified} right in the interpreter"
    told += f", {unverified} not interpreted" if unverified else ""
    told += f", {spills} B spilled" + (f", at most {slots:.1f} slots a byte at this size" if slots is not None else "")
    yield row("warning" if spills else "ok", f"{told}, {seconds:.1f} s", what=name, kernels=len(kernels),
              verified=verified, unverified=unverified, spills=spills, slots_a_byte=slots, seconds=seconds)  # fmt: skip


def checks_for(target: str) -> Mapping[str, Callable[[], Iterator[Row]]]:
    """The checks of a target."""
    return {"target": partial(target_known, target), **{name: partial(program, name, target) for name in PROGRAMS}}
