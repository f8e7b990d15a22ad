"""Arguments that a program has for itself: who holds a tensor is seen, and what others hold is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.runtime.host import own_memory
from torch_mlc.runtime.host.own_memory import copied, is_alone, with_own_memory
from torch_mlc.runtime.pool.pool import POOL

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "name": lambda t: t,
    "view": lambda t: t[1:],
    "detached": lambda t: t.detach(),
    "storage": lambda t: t.untyped_storage(),
    "array": lambda t: t.numpy(),
    "capsule": lambda t: torch.utils.dlpack.to_dlpack(t),
}


def plain(elements: int) -> Tensor:
    return torch.zeros(elements)


def of_pool(elements: int) -> Tensor:
    return POOL.empty((elements,), (1,), torch.float32)


@pytest.mark.parametrize("make", [plain, of_pool])
@pytest.mark.parametrize("elements", [1, 4 << 20])
@pytest.mark.parametrize("holder", ["", *HOLDERS])
def test_who_holds_a_tensor_is_seen(make: Callable[[int], Tensor], elements: int, holder: str) -> None:
    args = [make(elements)]
    held = HOLDERS[holder](args[0]) if holder else None
    assert is_alone(args, 0) is (holder == "")
    if holder not in ("", "array"):  # what has been an array may stay one
        del held
        assert is_alone(args, 0)


def test_a_tensor_that_is_saved_is_not_alone() -> None:
    x = torch.ones(5, requires_grad=True)
    args = [x * 2]
    y = args[0].sin()  # saves its argument
    assert not is_alone(args, 0)
    del y
    assert not is_alone([args[0]], 0)


def test_outside_of_a_backward_arguments_are_copied() -> None:
    seen: list[Tensor] = []
    program = with_own_memory(lambda args: seen.extend(args) or (), (1,))
    first, second = torch.randn(3, 4), torch.randn(4, 3).t()
    program([first, second])
    assert seen[0] is first
    assert seen[1] is not second and torch.equal(seen[1], second) and seen[1].stride() == second.stride()
    assert seen[1].data_ptr() != second.data_ptr()


def test_a_backward_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "_retains", lambda: False)
    seen: list[int] = []
    program = with_own_memory(lambda args: seen.append(args[0].data_ptr()) or (), (0,))
    args = [torch.randn(7)]
    address = args[0].data_ptr()
    program(args)
    kept = args[0]
    program(args)
    assert seen[0] == address
    assert seen[1] != address and torch.equal(args[0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_copy_has_the_same_strides(dtype: torch.dtype) -> None:
    x = torch.randint(2, (4, 6, 5)).to(dtype).permute(2, 0, 1)[:, ::2]
    y = copied(x)
    assert torch.equal(x, y) and x.stride() == y.stride() and y.dtype is dtype
