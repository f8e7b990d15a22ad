"""Native host programs as text: where values lie, and how ops are called through torch's C interface."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.codegen.host import Allocate, BindSize, Free, HostProgram, KernelUse, Launch, MakeView, Return, Step
from torch_mlc.codegen.host_frame import plan_frame
from torch_mlc.codegen.host_native import emit_native
from torch_mlc.codegen.host_shims import Array, Handle, Null, Shims, Word, shim_call
from torch_mlc.codegen.kernel import EmitError
from torch_mlc.ir.dtypes import DType
from torch_mlc.ir.expr import symbol
from torch_mlc.ir.graph import Library, Ref, TensorType
from torch_mlc.runtime.host_native import shims

USE = KernelUse("k0_", ())


def kind(*shape: int, dtype: DType = DType.FLOAT32, device: str = "cpu") -> TensorType:
    strides = [sympy.prod(shape[k + 1 :]) for k in range(len(shape))]
    return TensorType(tuple(map(sympy.Integer, shape)), tuple(map(sympy.Integer, strides)), dtype, device)


def launch(*tensors: str) -> Launch:
    return Launch(USE, tensors, (), "cpu")


def program(*steps: Step, result: str) -> HostProgram:
    return HostProgram("p", ("x",), {"x": kind(8)}, (*steps, Return((result,))))


def test_what_callers_see_are_tensors() -> None:
    steps = (
        Allocate("inside", kind(8)),
        Allocate("out", kind(8)),
        launch("x", "inside", "out"),
        MakeView("view", kind(4), "out", sympy.S.Zero),
        Free(("inside",)),
        launch("view", "out"),
    )
    frame = plan_frame(program(*steps, result="view"))
    assert {"out", "view"} <= frame.tensors and "inside" not in frame.tensors


def test_ops_through_the_interface() -> None:
    a = Library(("y",), (kind(3, 5),), "aten::addmm.default", (Ref("b"), Ref("x"), Ref("w")), (("alpha", 2),))
    call = shim_call(a, shims())
    assert call is not None and call.out and call.function == "aoti_torch_cpu_addmm_out"
    assert call.arguments == (Handle("b"), Handle("x"), Handle("w"), Word("double", 1.0), Word("double", 2.0))
    n = symbol("s0")
    pair = (1, n)
    args = (Ref("x"), Ref("w"), None, pair, (0, 0), (1, 1), False, (0, 0), 1)
    conv = shim_call(Library(("y",), (kind(1, 2, 3, 4),), "aten::convolution.default", args), shims())
    assert conv is not None and not conv.out
    assert conv.arguments[2:4] == (Null(), Array("i64", (sympy.S.One, n)))


def test_ops_that_python_calls() -> None:
    """Scalars of integers are no doubles, lists of results have no form, and a prototype that differs is not called."""
    addmm = ("aten::addmm.default", (Ref("b"), Ref("x"), Ref("w")))
    whole = Library(("y",), (kind(3, 5, dtype=DType.INT64),), *addmm)
    split = Library(("y", "z"), (kind(3), kind(3)), "aten::split.Tensor", (Ref("x"), 3))
    for node in (whole, split, Library(("y",), (None,), "hop::cond", ())):
        assert shim_call(node, shims()) is None
    floats = Library(("y",), (kind(3, 5),), *addmm)
    assert shim_call(floats, shims()) is not None
    assert shim_call(floats, Shims({"aoti_torch_cpu_addmm_out": ("AtenTensorHandle",) * 4})) is None


def test_what_has_no_native_program() -> None:
    n, m = symbol("s0"), symbol("s1")
    binds = (BindSize(n, "x", 0), BindSize(m, "x", 0))
    steps = (*binds, Allocate("a", TensorType((FloorDiv(n, m),), (sympy.S.One,), DType.FLOAT32)), launch("x", "a"))
    with pytest.raises(EmitError, match="division by s1"):
        emit_native(program(*steps, result="a"), shims())
    other = (Allocate("a", kind(8, device="cuda:0")), Launch(USE, ("x", "a"), (), "cuda:0"))
    with pytest.raises(EmitError, match="CPUs alone"):
        emit_native(program(*other, result="a"), shims())
