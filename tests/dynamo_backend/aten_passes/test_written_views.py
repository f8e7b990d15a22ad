"""Results that are views of inputs which the graph writes over: eager's views, wherever the input lies in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ..entry.test_mutation import same


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["offset", "transposed", "every second", "both"])
def test_views_of_written_inputs_that_lie_anywhere(dynamic: bool, layout: str) -> None:
    """Views of a written input are eager's views of it, wherever it lies in its storage."""
    memory = torch.randn(24, 30)
    x = {
        "offset": memory[3:, 5:9],
        "transposed": memory.t(),
        "every second": memory[::2],
        "both": memory[2:, 1:].t()[::2],
    }

    def copied(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        part = x[x.shape[0] // 2 :]
        x.copy_(y)
        return part, part.t()[1:], x[1], y + 1

    def scaled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        part = x[1:].t()
        x.mul_(2).add_(y)
        return part, x[:, -1], part.sum(0)

    for fn in (copied, scaled):
        same(fn, x[layout], torch.randn(x[layout].shape), dynamic=dynamic)


def same_size(x: Tensor) -> Tensor:
    return x.expand(x.shape)


def many_rows(x: Tensor) -> Tensor:
    return x.expand(3, *x.shape)


def half(x: Tensor) -> Tensor:
    return x[: x.shape[0] // 2]


def windows(x: Tensor) -> Tensor:
    return x.unfold(0, x.shape[0] // 2, 2)


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x[: x.shape[0] // 2 * 2].view(-1, 2)).real


def bits(x: Tensor) -> Tensor:
    return x[x.shape[0] // 3 :].view(torch.int32)


VIEWS = [same_size, many_rows, half, windows, pairs, bits]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_sizes_and_offsets_that_vary(view: Callable[[Tensor], Tensor], recorded: bool) -> None:
    """A view whose sizes are those of the input, taken before it is written in part; ``recorded`` by autograd, which
    is given what is written, so that the graph does not write it itself."""

    def fn(x: Tensor) -> Tensor:
        part = view(x)
        x[1:-1].mul_(0.5)
        return part

    if recorded and view is bits:
        pytest.skip("integers have no gradient")
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True, fullgraph=True)
    for offset, length in ((2, 6), (4, 8), (0, 4), (6, 11)):
        sides = []
        for call in (compiled, fn):
            leaf = torch.arange(1.0, length + 9, requires_grad=recorded)
            memory = leaf * 1
            x = memory[offset : offset + length]
            part = call(x)
            shared = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            told = (part.shape, part.stride(), part.storage_offset(), shared)
            gradient = torch.autograd.grad(part.sum(), leaf)[0] if recorded else torch.zeros(())
            sides.append((told, part.detach().clone(), memory.detach().clone(), gradient))
        assert sides[0][0] == sides[1][0]
        torch.testing.assert_close(sides[0][1:], sides[1][1:], rtol=0, atol=0)
