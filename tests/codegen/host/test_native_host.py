"""Native host programs as text: where values lie, and how ops are called through torch's C interface."""

import re
from dataclasses import replace

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.codegen.host.memory.plan_memory import plan_memory
from torch_mlc.codegen.host.native.frame import plan_frame
from torch_mlc.codegen.host.native.native import GET_STREAM, emit_native, python_launches
from torch_mlc.codegen.host.native.shims import Array, Handle, Null, Shims, Word, shim_call
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import Grid, KernelUse
from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.resolved import RunKernel
from torch_mlc.codegen.host.steps.step import Allocate, BindSize, Free, HostStep, Launch, MakeView, Return
from torch_mlc.codegen.kernel import EmitError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import Library, Ref, TensorType
from torch_mlc.runtime.host.native import shims

USE = KernelUse("k0_", ())


def kind(*shape: int, dtype: DType = DType.FLOAT32, device: str = "cpu") -> TensorType:
    strides = [sympy.prod(shape[k + 1 :]) for k in range(len(shape))]
    return TensorType(tuple(map(sympy.Integer, shape)), tuple(map(sympy.Integer, strides)), dtype, device)


def launch(*tensors: str) -> Launch:
    return Launch(USE, tensors, (), "cpu")


def program(*steps: HostStep, result: str) -> HostProgram:
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
    frame = plan_frame(resolve(program(*steps, result="view")))
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
        emit_native(resolve(program(*steps, result="a")), shims())
    one, two = (Allocate(name, kind(8, device=f"cuda:{k}")) for k, name in enumerate("ab"))
    with pytest.raises(EmitError, match=r"for one GPU, and this one uses \['cuda:0', 'cuda:1'\]"):
        emit_native(resolve(program(one, two, result="a")), shims())
    other = (one, Launch(USE, ("x", "a"), (), "cuda:0"))
    with pytest.raises(EmitError, match="cannot use cuda:0 here"):
        emit_native(resolve(program(*other, result="a")), shims())


GPU = Shims({}, {"float32": 6}, {"cpu": 0, "cuda": 1}, {})
N = symbol("n")


def gpu_launch(use: KernelUse, *tensors: str, count: int = 1) -> Launch:
    return Launch(use, tensors, (symbol("s0"),) * count, "cuda:1", count=count)


def gpu_program(*steps: HostStep) -> HostProgram:
    inside = kind(8, device="cuda:1")
    steps = (BindSize(symbol("s0"), "x", 0), Allocate("a", inside), *steps, Return(("a",)))
    return HostProgram("p", ("x",), {"x": inside}, steps)


def test_launches_on_a_gpu_take_addresses_sizes_and_a_grid() -> None:
    use = KernelUse("k0_", (0,), grid=Grid((FloorDiv(N + 63, 64), N), ("n",)))
    p = gpu_program(gpu_launch(use, "x", "a"), gpu_launch(use, "a", "a"))
    host = emit_native(resolve(p), GPU)
    assert host.gpu == 1
    assert {("record", "k0_"), ("function", GET_STREAM)} < {*host.own}
    # The stream is asked for once, and the grid is computed once.
    assert host.text.count("(i32 1, ptr %stream)") == 1 and host.text.count("sdiv") == 1
    assert "k0_(1, x, a, s0)" in host.rescues.text
    assert "k0_(1, x.data_ptr(), a.data_ptr(), s0)" in print_host(resolve(p)).text
    assert not host.parts.text.strip()


def test_launches_are_told_how_far_their_indices_reach() -> None:
    use = KernelUse("k0_", (0,), grid=Grid((FloorDiv(N + 63, 64),), ("n",), N * 1000 + 7))
    text = emit_native(resolve(gpu_program(gpu_launch(use, "x", "a"))), GPU).text
    (reach,) = re.findall(r"i64 1, i64 1, i64 (%\w+), ptr %\w+\)", text)
    assert re.search(rf"{reach} = add i64 (7, %\w+|%\w+, 7)\n", text)
    # What decides nothing is not computed.
    fixed = KernelUse("k0_", (0,), grid=Grid((FloorDiv(N + 63, 64),), ("n",)))
    assert "i64 1, i64 1, i64 0, ptr" in emit_native(resolve(gpu_program(gpu_launch(fixed, "x", "a"))), GPU).text


def test_launches_that_python_makes() -> None:
    grid = Grid((N,), ("n",))
    table = gpu_launch(KernelUse("k0_", (0,), table=True, grid=grid), "x", "a", "a", "x", count=2)
    tiles = gpu_launch(KernelUse("k1_", (0,), by_pointer=False, grid=grid), "x", "a")
    many = gpu_launch(KernelUse("k2_", (0,), grid=grid), *["x", "a"] * 32)
    p = resolve(gpu_program(table, tiles, many))
    assert all(python_launches(step) for step in p.steps if isinstance(step, RunKernel))
    (plain,) = (s for s in resolve(program(launch("x", "x"), result="x")).steps if isinstance(s, RunKernel))
    assert not python_launches(plain)
    host = emit_native(p, GPU)
    kinds = [kind for kind, _ in host.own]
    assert kinds.count("part") == 3 and "record" not in kinds
    assert "k0_(1, 2, x, a, s0, a, x, s0)" in host.parts.text and "k1_((x, a), (s0,))" in host.parts.text


def test_a_small_arena_lies_on_the_stack() -> None:
    """As long as its size has a limit, and on CPUs alone."""
    s0 = symbol("s0")
    flat = TensorType((s0,), (sympy.S.One,), DType.FLOAT32)
    steps = (
        BindSize(s0, "x", 0),
        Allocate("a", flat),
        Allocate("b", flat),
        Allocate("c", flat),
        Launch(USE, ("x", "a", "b", "c"), (), "cpu"),
        Free(("a", "b")),
        Return(("c",)),
    )
    p = HostProgram("p", ("x",), {"x": flat}, steps, (s0,))
    for upper, stack in ((1000, True), (100_000, False), (None, False)):
        planned = plan_memory(replace(p, table=SymbolTable((Size(s0, 0, upper, 16, 500),))))
        assert planned.arena is not None and (planned.arena.bound is None) == (upper is None)
        text = emit_native(resolve(planned), shims()).text
        assert (f"%stack = alloca [{planned.arena.bound} x i8], align 64" in text) == stack


def test_each_of_several_gpus_is_made_current() -> None:
    use = KernelUse("k0_", (), grid=Grid((sympy.S.One,), ()))
    one, two = (kind(8, device=f"cuda:{k}") for k in range(2))
    steps = (
        Allocate("a", one),
        Allocate("b", two),
        Launch(use, ("x", "a"), (), "cuda:0"),
        Launch(use, ("b",), (), "cuda:1"),
        Return(("a", "b")),
    )
    text = print_host(resolve(HostProgram("p", ("x",), {"x": one}, steps))).text
    assert "a = empty_((8,), (1,), dtype=torch.float32, device='cuda:0')" in text
    assert "with guard_(0): k0_(0, x.data_ptr(), a.data_ptr())" in text
    assert "with guard_(1): k0_(1, b.data_ptr())" in text
