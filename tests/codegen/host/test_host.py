"""Host programs: what their text does with sizes, memory and names."""

import sympy

from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.codegen.host.steps.program import HostProgram
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.codegen.host.steps.step import Allocate, Reuse
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Ref, SizeInput, TensorType, View

N, I0 = symbol("s0"), symbol("i0")
USE = {"f": KernelUse("k0_", (0,))}


def vector(n: sympy.Expr = N) -> TensorType:
    return TensorType((n,), (sympy.S.One,), DType.FLOAT32)


def call(name: str, *args: str, kind: TensorType | None = None) -> CallTensor:
    return CallTensor((name,), (kind or vector(),), "f", args, (N,))


def graph(inputs: tuple[Input | SizeInput, ...], nodes: tuple[object, ...], *outputs: object) -> Graph:
    return Graph("g", inputs, nodes, outputs, SymbolTable((Size(N),)))  # type: ignore[arg-type]


def lines(program: HostProgram) -> list[str]:
    return [line.strip() for line in print_host(resolve(program)).text.splitlines()[2:]]


def test_a_chain_of_kernels_as_text() -> None:
    g = graph((SizeInput("n", N), Input("x", vector())), (call("a", "x"), call("b", "a"), call("c", "b")), "c", 2 * N)
    assert lines(build_host_program(g, USE)) == [
        "n, x = args",
        "args.clear()",
        "with_memory_((x,), (1,))",
        "s0 = n",
        "a = block_cpu_((s0,), (1,), torch.float32)",
        "k0_(x.data_ptr(), a.data_ptr(), s0)",
        "del x",
        "b = block_cpu_((s0,), (1,), torch.float32, rounded=True)",
        "k0_(a.data_ptr(), b.data_ptr(), s0)",
        "c = a; del a  # takes over its memory",
        "k0_(b.data_ptr(), c.data_ptr(), s0)",
        "del b",
        "n0_ = 2 * s0",
        "return (c, n0_)",
    ]


def test_memory_that_a_view_or_a_library_may_still_see_is_not_taken_over() -> None:
    view = View("v", vector(), "a", (I0,), (I0,))
    library = Library(("m",), (vector(),), "aten::sin.default", (Ref("a"),))
    for between, outputs in ((view, ("c", "v")), (library, ("c", "m"))):
        nodes = (call("a", "x"), between, call("b", "a"), call("c", "b"))
        program = build_host_program(graph((SizeInput("n", N), Input("x", vector())), nodes, *outputs), USE)
        assert sum(isinstance(s, Allocate) for s in program.steps) == 3
        assert not any(isinstance(s, Reuse) for s in program.steps)


def test_a_size_is_read_from_a_dimension_or_solved_for() -> None:
    nodes = (call("a", "x"),)
    for kind, wanted in ((vector(), "s0 = x.size(0)"), (vector(4 * N + 2), "s0 = (x.size(0) - 2) // 4")):
        assert wanted in lines(build_host_program(graph((Input("x", kind),), nodes, "a"), USE))


def test_the_peak_is_what_is_held_at_once() -> None:
    # a and b at once, then b and c; a is not needed any more, and the last allocation takes over its memory.
    nodes = (call("a", "x"), call("b", "a"), call("c", "b"))
    program = build_host_program(graph((SizeInput("n", N), Input("x", vector())), nodes, "c"), USE)
    assert program.peak_bytes == 8 * N
    small = TensorType((sympy.Integer(3),), (sympy.S.One,), DType.FLOAT64)
    program = build_host_program(graph((SizeInput("n", N),), (call("a"), call("b", "a", kind=small)), "b"), USE)
    assert program.peak_bytes == 4 * N + 24


def test_names_that_python_would_not_take() -> None:
    g = graph((SizeInput("s0", N), Input("class", vector())), (call("torch", "class"), call("a.b", "torch")), "a.b")
    text = print_host(resolve(build_host_program(g, USE))).text
    compile(text, "<test>", "exec")
    assert "torch = " not in text.replace("v_torch = ", "")


def test_results_of_libraries_are_looked_at_unless_they_are_sure() -> None:
    inputs = (SizeInput("n", N), Input("x", vector()))
    for op, looked_at in (("aten::mm.default", False), ("aten::cumsum.default", True)):
        node = Library(("m",), (vector(),), op, (Ref("x"), 0))
        read = graph(inputs, (node, call("c", "m")), "c")
        saved = graph(inputs, (node,), "m")
        for program in (build_host_program(read, USE), build_host_program(saved, USE, returned=0)):
            assert ("checked_(m, (s0,), (1,))" in print_host(resolve(program)).text) == looked_at
        # A caller takes it as the op gives it, in eager's layout.
        assert "checked_" not in print_host(resolve(build_host_program(saved, USE))).text


def test_numbers_that_python_has_no_literal_for() -> None:
    numbers = (float("inf"), complex(float("nan"), float("-inf")), 2.5, 1 - 2j)
    inputs = (SizeInput("n", N), Input("x", vector()))
    node = Library(("m",), (vector(),), "aten::cumsum.default", (Ref("x"), numbers))
    text = print_host(resolve(build_host_program(graph(inputs, (node,), "m"), USE))).text
    (line,) = (line for line in text.splitlines() if "aten_cumsum_default_(" in line)
    assert repr(eval(line[line.index("[") : line.index("]") + 1])) == repr(list(numbers))
