"""What resolving decides: where names lie, when arguments are looked at, what kernels take, when sizes are computed."""

from __future__ import annotations

import sympy

from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import Grid, KernelUse
from torch_mlc.codegen.host.steps.program import Arena, HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.resolved import (
    DropArena,
    Forget,
    HoldArena,
    Let,
    LookAt,
    Pointer,
    PointTo,
    Rename,
    Row,
    RunKernel,
    Take,
)
from torch_mlc.codegen.host.steps.step import (
    Allocate,
    BindSize,
    CallLibrary,
    Free,
    HostStep,
    Item,
    Launch,
    MakeView,
    Repeat,
    Return,
    Reuse,
    WriteOver,
)
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import Library, Ref, TensorType

N, ZERO = symbol("s0"), sympy.S.Zero
USE = KernelUse("k0_", (0,))


def vector(n: sympy.Expr = N, device: str = "cpu") -> TensorType:
    return TensorType((n,), (sympy.S.One,), DType.FLOAT32, device)


def steps_of(*steps: HostStep, arena: Arena | None = None, inputs: tuple[str, ...] = ("x",)) -> tuple[HostStep, ...]:
    return resolve(HostProgram("p", inputs, dict.fromkeys(inputs, vector()), steps, (N,), arena=arena)).steps


def launch(*tensors: str) -> Launch:
    return Launch(USE, tensors, (N,), "cpu")


def run(*pointers: Pointer) -> RunKernel:
    return RunKernel(USE, (Row(pointers, (N,)),), 1, "", "", "cpu", "")


def test_names_in_the_arena_are_addresses() -> None:
    arena = Arena("cpu", 8 * N, {"a": ZERO, "b": 4 * N}, 1, 7)
    x, out = Pointer("x", False), Pointer("out", False)
    a, b, c, half = (Pointer(n, True) for n in ("a", "b", "c", "half"))
    assert steps_of(
        BindSize(N, "x", 0),
        Allocate("a", vector()),
        launch("x", "a"),
        Allocate("b", vector()),
        MakeView("half", vector(N - 2), "a", sympy.Integer(2)),
        launch("half", "b"),
        Reuse("c", "a"),
        launch("b", "c"),
        Allocate("out", vector()),
        launch("c", "out"),
        Free(("half", "b", "c", "x")),
        Return(("out",)),
        arena=arena,
    ) == (
        Take(("x",), None, {}, "", {"x": 1}),
        LookAt({"x": 1}, {}, True),
        BindSize(N, "x", 0),
        Let("n0_", 8 * N),
        HoldArena(8 * N, "cpu", None),
        PointTo("a", "", ZERO),
        run(x, a),
        Let("n1_", 4 * N),
        PointTo("b", "", 4 * N),
        PointTo("half", "a", sympy.Integer(8)),
        run(half, b),
        Rename("c", a, takes_over=True),
        run(b, c),
        DropArena(),
        Allocate("out", vector()),
        run(c, out),
        Forget((half, b, c, x)),
        Return(("out",)),
    )


def test_a_size_is_computed_before_the_first_step_that_needs_it() -> None:
    steps = steps_of(
        BindSize(N, "x", 0), Allocate("a", vector(2 * N)), Allocate("b", vector(2 * N)), Return(("a", "b", N, 3 * N, 4))
    )
    assert [s for s in steps if isinstance(s, Let)] == [Let("n0_", 2 * N), Let("n1_", 3 * N)]
    assert isinstance(steps[steps.index(Let("n0_", 2 * N)) + 1], Allocate)
    assert steps[-2] == Let("n1_", 3 * N)


def test_arguments_are_looked_at_late_where_ops_may_give_them_memory() -> None:
    """And not before such an op itself."""
    resized = CallLibrary(Library((), (), "inductor::resize_storage_bytes_.default", (Ref("x"), 64)))
    sine = CallLibrary(Library(("s",), (vector(),), "aten::sin.default", (Ref("y"),)))
    written = WriteOver("z", "x")
    inputs = ("x", "y")
    steps = steps_of(BindSize(N, "x", 0), resized, sine, written, launch("y", "z"), Return(("z",)), inputs=inputs)
    look = [k for k, s in enumerate(steps) if isinstance(s, LookAt)]
    assert [steps[k] for k in look] == [LookAt({"y": 1}, {}, True), LookAt({"x": 1}, {}, True)]
    assert [steps[k + 1] for k in look] == [sine, Rename("z", Pointer("x", False), takes_over=False)]


def test_a_table_is_taken_row_by_row() -> None:
    use = KernelUse("k0_", (0,), table=True)
    (found,) = (
        s
        for s in steps_of(Launch(use, ("x", "y", "y", "x"), (N, 2 * N), "cpu", count=2), Return(()), inputs=("x", "y"))
        if isinstance(s, RunKernel)
    )
    x, y = Pointer("x", False), Pointer("y", False)
    assert list(found.arguments) == [2, x, y, N, y, x, 2 * N]


def test_gpus_of_launches() -> None:
    use = KernelUse("k0_", (), grid=Grid((N,), ("n",)))
    tensors = KernelUse("k1_", (), by_pointer=False, grid=Grid((N,), ("n",)))
    one, other = (Launch(u, ("x",), (), "cuda:1") for u in (use, tensors))
    take, *rest = steps_of(one, other, Return(()))
    assert isinstance(take, Take) and take.gpu == "cuda:1"
    assert [(s.gpu, s.guard) for s in rest if isinstance(s, RunKernel)] == [("1", ""), ("", "")]
    take, *rest = steps_of(one, Launch(use, ("x",), (), "cuda:0"), Return(()))
    assert isinstance(take, Take) and take.gpu == ""
    assert [(s.gpu, s.guard) for s in rest if isinstance(s, RunKernel)] == [("1", "1"), ("0", "0")]


def test_steps_that_repeat_take_from_lists_and_leave_in_lists() -> None:
    body = (Allocate("h", vector()), launch("x", "w0", "h"), Free(("x", "w0")))
    loop = Repeat(body, 2, {"w0": ("w0", "w1")}, {"h": ("h 0", "h 1")}, (("x", "h", "x"),))
    program = HostProgram(
        "p", ("w0", "unread", "x", "w1"), dict.fromkeys(("w0", "unread", "x", "w1"), vector()),
        (BindSize(N, "w0", 0), loop, Return(("h 1", "h 0"))), (N,),
    )  # fmt: skip
    steps = resolve(program).steps
    assert steps[0] == Take(("x",), (2,), {"w0 each": (3, 0)}, "", dict.fromkeys(program.inputs, 1))
    assert BindSize(N, Item("w0 each", -1), 0) in steps
    assert steps[-1] == Return((Item("h all", 1), Item("h all", 0)))
    assert print_host(resolve(program)).text.splitlines()[2:7] == [
        "    w0_each = args[3::-3]",
        "    x, = [args[k] for k in (2,)]",
        "    args.clear()",
        "    with_memory_((x, *w0_each), (1, *[1] * 2))",
        "    s0 = w0_each[-1].size(0)",
    ]
