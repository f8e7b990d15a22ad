"""Schedules by hand as functions of tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torch_mlc
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.compile.arguments import CallError

SUMS = """
@nest(outputs=["out0", "out1"])
def sums(in0: tensor(float32, [s0, 2*s1 + 1], strides=[2*s1 + 1, 1]), out0: float32[s0], in1: float32[s0],
         out1: tensor(float32, [2*s1 + 1, s0], strides=[1, 2*s1 + 1])):
    s0 = size(divisor=2)
    s1 = size(lower=1, upper=99)
    for a in serial(s0):
        for b in serial(2*s1 + 1):
            with block("b0"):
                i = spatial(s0, a)
                r = reduction(2*s1 + 1, b)
                out0[i] = sum.update(mul(in0[i, r], in1[i]))
    for c in serial(s0):
        for d in serial(2*s1 + 1):
            with block("b1"):
                i = spatial(s0, c)
                j = spatial(2*s1 + 1, d)
                out1[j, i] = add(in0[i, j], in1[i])
"""


def nest_of(text: str) -> LoopNest:
    nest = parse(text.strip() + "\n")
    assert isinstance(nest, LoopNest)
    return nest


def scheduled() -> torch_mlc.Schedule:
    s = torch_mlc.Schedule(nest_of(SUMS))
    s.vectorize(s.split("d", [None, 8])[1])
    s.parallel("a")
    return s


def test_outputs_are_made_in_the_layout_of_the_nest() -> None:
    run = torch_mlc.compile(scheduled())
    assert run.target.kind == "cpu" and run.source.language == "llvm"
    for n, m in ((4, 3), (2, 7), (0, 5)):
        x, y = torch.randn(n, m), torch.randn(n)
        total, both = run(x, y)
        torch.testing.assert_close(total, (x * y[:, None]).sum(1))
        torch.testing.assert_close(both, (x + y[:, None]).t(), rtol=0, atol=0)
        assert n == 0 or both.stride() == (1, m)


SUM = """
@nest(outputs=["out0"])
def rows(in0: tensor(float32, [s0, s1], strides=[s2, s3]), out0: float32[s0]):
    s0 = size()
    s1 = size()
    s2 = size()
    s3 = size()
    for a in serial(s0):
        for b in serial(s1):
            with block("b0"):
                i = spatial(s0, a)
                r = reduction(s1, b)
                out0[i] = sum.update(in0[i, r])
"""


def test_what_is_negative_by_a_bit() -> None:
    """Kernels read memory as it is."""
    run = torch_mlc.compile(nest_of(SUM))
    x = torch.randn(5, 7, dtype=torch.complex64).conj().imag
    for given in (x, x.t(), x[1:, ::2], x[:1].expand(3, 7), x[:0]):
        assert given.is_neg()
        sizes = {f"s{2 + d}": given.stride(d) for d in (0, 1)}
        torch.testing.assert_close(run(given, **sizes), given.sum(1))


def test_arguments_without_memory_are_refused() -> None:
    run = torch_mlc.compile(nest_of(SUM))
    layout = {"s2": 7, "s3": 1}
    x = torch.randn(5, 7)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    freed, cut = x.clone(), x.clone()
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(4 * 34)
    for given in (fake, freed, cut, TwoTensor(x.clone(), x.clone())):
        with pytest.raises(CallError, match="the argument for in0 has no memory"):
            run(given, **layout)
    torch.testing.assert_close(run(x, **layout), x.sum(1))
    assert run(torch.empty(0, 7), **layout).shape == (0,)
    with pytest.raises(CallError, match=r"s3 is a whole number, not 1\.5"):
        run(x, s2=7, s3=1.5)


def test_a_size_that_no_shape_tells_is_passed_by_name() -> None:
    nest = nest_of(
        '@nest(outputs=["out0"])\n'
        "def ramp(out0: int64[s0]):\n"
        "    s0 = size()\n"
        "    for a in serial(s0):\n"
        '        with block("b"):\n'
        "            i = spatial(s0, a)\n"
        "            out0[i] = index(3*i, int64)\n"
    )
    run = torch_mlc.compile(nest)
    result = run(s0=5)
    assert isinstance(result, torch.Tensor) and result.tolist() == [0, 3, 6, 9, 12]
    with pytest.raises(CallError, match="no shape of an input tells s0"):
        run()
    with pytest.raises(CallError, match="ramp has no size n; its sizes are s0"):
        run(n=5)


X, Y = torch.randn(4, 7), torch.randn(4)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ((X,), r"takes 2 inputs \(in0: float32\[s0, 2\*s1 \+ 1\], in1: float32\[s0\]\), 1 were given"),
        ((X, Y.double()), "in1 is of torch.float32, the argument of torch.float64"),
        ((X, Y[:3]), "dimension 0 of in1 has to be s0 = 4, the argument's is 3"),
        ((X, torch.randn(8)[::2]), "stride 0 of in1 has to be 1, the argument's is 2"),
        ((X.t().contiguous().t(), Y), "stride 0 of in0 has to be 2.s1 . 1 = 7, the argument's is 1"),
        ((X[0], Y), "has 2 dimensions, the argument 1"),
        ((X, Y.to("meta")), "in1 has to be on cpu; the argument is on meta"),
        ((X, 3), "in1 is a strided tensor, not int"),
        ((X, Y.to_sparse()), "in1 is a strided tensor"),
        ((X[:3], Y[:3]), "s0 is 3; the code is for sizes from 0 to any, divisible by 2"),
        ((torch.randn(4, 201), Y), "s1 is 100; the code is for sizes from 1 to 99"),
        ((torch.randn(4, 6), Y), "dimension 1 of in0|no shape of an input tells s1"),
    ],
)
def test_arguments_that_do_not_fit(inputs: tuple[object, ...], told: str) -> None:
    run = torch_mlc.compile(scheduled())
    with pytest.raises(CallError, match=told):
        run(*inputs)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    s = torch_mlc.Schedule(nest_of(SUMS))
    s.merge("a", "c")
    s.bind("a", "blockIdx.x")
    s.bind(s.split("b", [None, 64])[1], "threadIdx.x")
    s.bind(s.split("d", [None, 64])[1], "threadIdx.x")
    run = torch_mlc.compile(s, "cuda:sm_90")
    assert run.source.language == "triton" and run.code.payload and str(run.target) == "cuda:sm_90"
    with pytest.raises(CallError, match="in0 has to be on cuda, as the kernel is for cuda:sm_90"):
        run(X, Y)


def test_loops_of_another_target_are_an_error() -> None:
    s = torch_mlc.Schedule(nest_of(SUMS))
    s.bind("a", "blockIdx.x")
    with pytest.raises(Exception, match="blockIdx"):
        torch_mlc.compile(s, "cpu")
