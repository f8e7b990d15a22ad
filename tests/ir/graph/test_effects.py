"""Effects: what a node writes over, what an op may pass on, and what must run though nobody reads it."""

from __future__ import annotations

import pytest
import sympy
import torch

from torch_mlc.ir.errors import IRError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.effects import has_effect, may_alias, resolve_op, written
from torch_mlc.ir.graph.graph import CallTensor, Library, Ref, TensorType

KIND = TensorType((sympy.Integer(8),), (sympy.S.One,), DType.FLOAT32)


def called(target: str, *given: object, **named: object) -> Library:
    return Library(("c",), (KIND,), target, given, tuple(named.items()))


def test_an_op_by_its_name() -> None:
    assert resolve_op("aten::addmm.default") is torch.ops.aten.addmm.default
    assert resolve_op("hop::cond") is torch.ops.higher_order.cond
    with pytest.raises(IRError, match=r"has no op aten::no_such_op\.default"):
        resolve_op("aten::no_such_op.default")


@pytest.mark.parametrize(
    ("node", "over"),
    [
        (called("aten::relu.default", Ref("x")), ()),
        (called("aten::copy_.default", Ref("x"), Ref("y")), ("x",)),
        (called("aten::add.out", Ref("x"), Ref("y"), out=Ref("z")), ("z",)),
        (called("aten::_foreach_add_.List", (Ref("x"), Ref("y")), (Ref("z"), Ref("u"))), ("x", "y")),
        (called("aten::no_such_op.default", Ref("x"), (Ref("y"), 1)), ("x", "y")),
        (called("hop::cond", Ref("x")), ()),
        (called("mlc::seeds", Ref("x")), ()),
        (CallTensor(("c", "d"), (KIND, KIND), "f", ("x",), into=("y", None)), ("y",)),
    ],
    ids=lambda x: getattr(x, "target", None),
)
def test_what_is_written_over(node: Library | CallTensor, over: tuple[str, ...]) -> None:
    assert written(node) == over


@pytest.mark.parametrize(
    ("target", "yes"),
    [("aten::relu.default", False), ("aten::view.default", True), ("aten::relu_.default", True), ("hop::cond", True),
     ("mlc::seeds", False), ("aten::no_such_op.default", True), ("_c10d_functional::wait_tensor.default", True)],
)  # fmt: skip
def test_memory_that_an_op_may_return(target: str, yes: bool) -> None:
    assert may_alias(target) is yes


@pytest.mark.parametrize(
    ("target", "yes"),
    [("aten::relu.default", False), ("aten::relu_.default", True), ("aten::__and__.Tensor", False),
     ("aten::copy_.default", True), ("aten::_assert_async.default", True), ("hop::cond", True),
     ("mlc::memory", False), ("mlc::seeds", True)],
)  # fmt: skip
def test_calls_that_must_run(target: str, yes: bool) -> None:
    assert has_effect(called(target)) is yes
