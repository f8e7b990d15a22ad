"""Frames of a compilation have room, however deep its caller is."""

from __future__ import annotations

import inspect
import traceback

import pytest
import torch
from torch import Tensor

from torch_mlc import register_pass
from torch_mlc.dynamo_backend.entry.frame_room import ROOM, with_frame_room


def test_a_function_with_room_is_the_same_function():
    @with_frame_room
    def join(first: int, *rest: int, last: int = 0) -> tuple[int, ...]:
        """Join numbers."""
        return (first, *rest, last)

    assert join(1, 2, last=3) == (1, 2, 3)
    assert (join.__name__, join.__doc__) == ("join", "Join numbers.")
    assert list(inspect.signature(join).parameters) == ["first", "rest", "last"]


def test_errors_pass_with_their_lines():
    @with_frame_room
    def fail() -> None:
        raise KeyError("nothing")

    with pytest.raises(KeyError) as error:
        fail()
    assert traceback.extract_tb(error.value.__traceback__)[-1].name == "fail"


def test_deep_calls_fit():
    @with_frame_room
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(100) == 100


def test_forward_and_backward_are_compiled_with_room():
    rooms: list[int] = []

    def look(graph: object) -> object:
        frame = inspect.currentframe()
        stack: list[int] = []
        while frame is not None:
            stack.append(frame.f_code.co_stacksize)
            frame = frame.f_back
        rooms.append(max(stack))
        return graph

    def double(x: Tensor) -> Tensor:
        return (x * 2).sin().sum()

    x = torch.randn(7, requires_grad=True)
    with register_pass(look, level="graph", name="look"):
        torch.compile(double, backend="mlc")(x).backward()
    assert rooms == [ROOM, ROOM]
