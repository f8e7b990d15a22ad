"""Concats of many equal parts: each position reads the one part that it is in, and gets the oracle's answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torch_mlc
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.rules import default_schedule

from .guarded import guarded_tensor
from .test_nests import Execute, check, kernels

Tensor = torch.Tensor
Program = Callable[..., Tensor]


def parts(count: int, *shape: int, last: bool = False) -> list[Tensor]:
    """Tensors of one shape, with dimension 1 in the last place in memory where asked for."""
    made = [torch.randn(*shape) for _ in range(count)]
    return [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in made] if last else made


PROGRAMS: dict[str, tuple[Program, list[Tensor]]] = {
    "rows": (lambda *x: torch.cat(x) * 2, parts(9, 3, 40)),
    "vectors": (lambda *x: torch.cat(x, 1) * 2, parts(7, 5, 32)),
    "vectors that end within parts": (lambda *x: torch.cat(x, 1) * 2, parts(7, 5, 24)),
    "odd parts": (lambda *x: torch.cat(x, 1).exp(), parts(6, 5, 7)),
    "a longer one first": (lambda *x: torch.cat(x, 1) + 1, [torch.randn(2, 64, 50), *parts(8, 2, 32, 50)]),
    "a longer one last": (lambda *x: torch.cat(x, 1) + 1, [*parts(8, 2, 32, 50), torch.randn(2, 64, 50)]),
    "between others": (lambda *x: torch.cat((x[0] * 3, *x[1:-1], x[-1] - 1), 1).relu(), parts(10, 2, 16, 33)),
    "channels last": (lambda *x: torch.cat(x, 1) * 2, parts(6, 1, 32, 4, 5, last=True)),
    "of both layouts": (
        lambda *x: torch.cat(x, 1) * 2, [torch.randn(1, 64, 8, 8), *parts(6, 1, 32, 8, 8, last=True)]
    ),
    "turned": (lambda *x: (torch.cat(x, 1) * 2).transpose(1, 2).contiguous(), parts(6, 2, 16, 48)),
    "numbers side by side": (lambda *x: torch.stack(x, -1) * 2, parts(6, 70)),
    "two of them": (lambda *x: torch.cat(x, 1) - torch.cat(x[::-1], 1), parts(6, 3, 16, 20)),
    "padded": (lambda *x: F.pad(torch.cat(x, 1), (2, 3, 5, 1)) + 1, parts(6, 2, 16, 20)),
    "shifted": (lambda *x: F.pad(torch.cat(x, 1), (-3, -5)) * 2, parts(6, 2, 16)),
    "summed": (lambda *x: torch.cat(x, 1).square().sum(1), parts(8, 3, 16, 20)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_joins_equal_the_oracle(name: str, execute: Execute, target: Target) -> None:
    program, inputs = PROGRAMS[name]
    for nest in kernels(program, tuple(inputs), dynamic=False):
        check(execute, nest, {}, target)


@pytest.mark.parametrize("name", PROGRAMS)
def test_joins_equal_eager_at_the_ends_of_memory(name: str) -> None:
    """Dead lanes and parts that are not chosen read nothing outside of any part."""
    torch._dynamo.reset()
    program, inputs = PROGRAMS[name]
    given = [guarded_tensor(t) if t.is_contiguous() else t for t in inputs]
    with torch.no_grad():
        got = torch.compile(program, backend="mlc")(*given)
    torch.testing.assert_close(got, program(*inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool], ids=str)
def test_types(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    inputs = [(torch.randn(3, 16, 21) * 9).to(dtype) for _ in range(7)]
    program = lambda *x: torch.cat(x, 1)[:, :, 1:].flip(1)  # noqa: E731
    got = torch.compile(program, backend="mlc")(*inputs)
    torch.testing.assert_close(got, program(*inputs), rtol=0, atol=0)


def test_infinite_and_missing_numbers_stay_in_their_part() -> None:
    torch._dynamo.reset()
    inputs = parts(6, 3, 16, 21)
    inputs[2].fill_(float("nan"))
    inputs[4].fill_(float("inf"))
    program = lambda *x: torch.cat(x, 1) * 0.5  # noqa: E731
    got = torch.compile(program, backend="mlc")(*inputs)
    torch.testing.assert_close(got, program(*inputs), rtol=0, atol=0, equal_nan=True)


def test_text_grows_by_lines_and_not_by_loads(target: Target) -> None:
    """A part more is a few addresses more, in each loop none: no load, no mask and no choice."""
    counts = []
    for count in (8, 16):
        inputs = (torch.zeros(1, 64, 64), *(torch.zeros(1, 32, 64) for _ in range(count)))
        (nest,) = kernels(lambda *x: torch.cat(x, 1).relu(), inputs, dynamic=False)
        text = emit_llvm(default_schedule(nest, target).nest, target).text
        counts.append([text.count(word) for word in ("load <", "masked.", " select ")])
    assert counts[0] == counts[1]


def test_vectors_that_cross_parts_stay_masked(target: Target) -> None:
    (nest,) = kernels(lambda *x: torch.cat(x, 1) * 2, tuple(parts(7, 5, 7)), dynamic=False)
    assert "alloca [7 x ptr]" not in emit_llvm(default_schedule(nest, target).nest, target).text


def test_parts_of_one_size_among_sizes(execute: Execute, target: Target) -> None:
    """The other dimension is a size that a call passes."""
    inputs = tuple(torch.zeros(16, 83) for _ in range(6))
    for t in inputs:
        torch._dynamo.mark_dynamic(t, 1)
    for nest in kernels(lambda *x: torch.cat(x) * 2, inputs, dynamic=True):
        for length in (83, 1, 12, 64, 257):
            check(execute, nest, dict.fromkeys((s.name for s in nest.symbols.symbols), length), target)


def test_explained_text_reads_one_part() -> None:
    inputs = parts(12, 1, 32, 64)
    (kernel,) = torch_mlc.explain(lambda *x: torch.cat(x, 1).relu(), *inputs).kernels
    assert "alloca [12 x ptr]" in kernel.source
