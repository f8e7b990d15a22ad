"""Slices of memory that kernels write: told by where they begin and how they lie, and inside of it."""

from dataclasses import replace

import pytest
import sympy

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.graph import Graph, Library, TensorType, View
from torch_mlc.ir.graph.slices import MEMORY
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify

ONE = sympy.S.One
WHOLE = TensorType((sympy.Integer(6), sympy.Integer(8)), (sympy.Integer(8), ONE), DType.FLOAT32)
PART = TensorType((sympy.Integer(2), sympy.Integer(8)), (sympy.Integer(8), ONE), DType.FLOAT32)


def sliced(part: TensorType = PART, offset: int = 32) -> Graph:
    memory = Library(("m",), (WHOLE,), MEMORY, (), (), "")
    return Graph("main", (), (memory, View("s", part, "m", (), (), sympy.Integer(offset))), ("s",))


def test_a_slice_that_is_inside_is_sound_and_read_back() -> None:
    graph = sliced()
    verify(graph)
    assert parse(show(graph)) == graph
    verify(sliced(replace(PART, shape=(sympy.S.Zero, sympy.Integer(8))), 48))


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (sliced(offset=33), "ends at element 48 of memory that ends at 47"),
        (sliced(offset=-1), "ends at element 14 of memory"),
        (sliced(replace(PART, dtype=DType.INT32)), "a slice of float32 as int32"),
    ],
)
def test_one_that_is_not_is_refused(graph: Graph, says: str) -> None:
    with pytest.raises(VerifyError, match=says):
        verify(graph)
