"""Checks of programs on the processor of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from .finding import Row, row
from .programs import PROGRAMS, DisagreementError, run

OPTIONS = {"cache": False, "strict": True}


def program(name: str, device: str) -> Iterator[Row]:
    """Compile, run and compare a program."""
    begin = time.perf_counter()
    try:
        outcome = run(PROGRAMS[name], device, OPTIONS)
    except DisagreementError as error:
        yield row("failed", str(error), "MLC_VERIFY=1 says which kernel is wrong; report it with this line")
        return
    seconds = time.perf_counter() - begin
    kernels = f"{outcome.kernels} kernel{'s' if outcome.kernels > 1 else ''}"
    yield row(
        "ok", f"{kernels}, as eager: error {outcome.error:.0e} of at most {outcome.limit:.0e}, {seconds:.1f} s",
        kernels=outcome.kernels, error=outcome.error, limit=outcome.limit, seconds=seconds,
    )  # fmt: skip


CHECKS: Mapping[str, Callable[[], Iterator[Row]]] = {name: partial(program, name, "cpu") for name in PROGRAMS}
