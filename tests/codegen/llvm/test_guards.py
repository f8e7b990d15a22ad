"""Positions that a value asks about divide the loops: no mask where the answer is known, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.rules import default_schedule

from .test_nests import Execute, check, kernels

Program = Callable[[torch.Tensor], torch.Tensor]

GUARDED: dict[str, Program] = {
    "padded on the right": lambda x: F.pad(x, (0, 37), value=2.0) * 3,
    "padded on the left": lambda x: F.pad(x, (5, 0), value=-1.0) + 1,
    "padded on all sides": lambda x: F.pad(x, (3, 66, 1, 2), value=0.5).exp(),
    "cut and padded": lambda x: F.pad(x, (-7, 40)) - 2,
    "summed with its border": lambda x: F.pad(x, (9, 70), value=1.0).sum(-1),
    "largest in the padded": lambda x: F.pad(x, (2, 2, 3, 3), value=-9.0).amax(0),
    "joined": lambda x: torch.cat([x, x * 2, x[:, :11]], 1),
    "halves turned": lambda x: torch.cat((x[:, :-9] * 3 - x[:, 9:], x[:, 9:] * 3 + x[:, :-9]), 1),
    "a causal mask": lambda x: torch.softmax(x.masked_fill(~torch.ones_like(x, dtype=torch.bool).tril(), -1e9), -1),
    "shifted": lambda x: x - F.pad(x, (1, 0))[:, :-1],
    "mean of all": lambda x: F.pad(x, (0, 0, 0, 1)).square().mean(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GUARDED)
def test_guarded_programs_equal_the_oracle(name: str, dynamic: bool, execute: Execute, target: Target) -> None:
    """Borders on either side, nothing but borders, and lengths that no vector divides."""
    x = torch.zeros(19, 83)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    for nest in kernels(GUARDED[name], (x,), dynamic=dynamic):
        symbols = [s.name for s in nest.symbols.symbols]
        for length in (83, 12, 64, 257) if symbols else (83,):
            check(execute, nest, dict.fromkeys(symbols, length), target)


@pytest.mark.parametrize("cores", [1, 2])
def test_the_tail_of_a_sum_of_everything_is_in_its_last_piece(cores: int, target: Target) -> None:
    """A sum in pieces guards its value beyond the end; the steady loop must not pay for it."""
    several = replace(target, cores=cores)
    (nest,) = kernels(lambda x: x.square().sum(), (torch.zeros(418_099),), dynamic=False)
    text = emit_llvm(default_schedule(nest, several).nest, several).text
    loops = text.split("head.")
    plain = [part for part in loops if "ptr %in0" in part and "load <" in part and "masked" not in part]
    assert plain, "every loop that reads the input is masked"


def test_a_gather_beyond_the_guard_is_never_read(execute: Execute, target: Target) -> None:
    """A select keeps its loads from running where it does not choose them, in borders as in the steady part."""
    x = torch.zeros(7, 40)
    for nest in kernels(lambda x: F.pad(x, (33, 33)) * 2, (x,), dynamic=False):
        data = np.arange(280, dtype=np.float32)
        got = execute(default_schedule(nest, target).nest, [data], {}, target)["out0"]
        assert np.array_equal(got[:, 33:73], data.reshape(7, 40) * 2)
        assert not got[:, :33].any() and not got[:, 73:].any()
