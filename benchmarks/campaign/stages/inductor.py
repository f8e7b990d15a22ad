"""Inductor on the kernels of the stage ``timing``: as it is, and with max-autotune."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import FunctionType

import torch

from ..cases import NamedKernel
from ..clock import timed
from ..plan import WITHOUT, Settings
from ..record import NOT_DONE, OK, Row
from .timing import called, timed_row

# Without CUDA graphs, which the clock makes itself where they matter.
_MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}


def check(settings: Settings, name: str) -> Iterator[Row]:
    """One kernel and one mode of Inductor: "softmax, odd, bfloat16, inference; default"."""
    if not settings.gpu:
        yield {"status": NOT_DONE, "why": f"no GPU: {WITHOUT['inductor']}"}
        return
    kernel, mode = name.split("; ")
    yield by_inductor(NamedKernel.of(kernel), _MODES[mode], settings.device, "cuda")


def by_inductor(kernel: NamedKernel, mode: str | None, device: str, kind: str) -> Row:
    """Seconds of Inductor's code."""
    plain = kernel.case.function
    assert isinstance(plain, FunctionType), plain
    code = plain.__code__.replace(co_name=f"{plain.__name__}_inductor")
    own = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    inputs = kernel.inputs(kind, device)
    function = torch.compile(own, backend="inductor", mode=mode, dynamic=False, fullgraph=True)
    begin = time.perf_counter()
    kernel.results(function, inputs)
    first = time.perf_counter() - begin
    found = timed({"inductor": called(kernel, function, inputs)}, device)
    torch._dynamo.reset()
    return {"status": OK, **timed_row(found), "mode": mode or "default", "first_call_s": first}
