"""The share of 16-byte accesses, each array by its bytes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from benchmarks.static.widths import accesses, wide_bytes

pytest.importorskip("triton")

PTX = """
    ld.param.b64 %rd1, [f_param_0];
    ld.param.b64 %rd2, [f_param_1];
    ld.param.b64 %rd3, [f_param_2];
    mul.wide.s32 %rd4, %r1, 2;
    add.s64 %rd5, %rd1, %rd4;
$L1:
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd8 + 0 ];
    cp.async.cg.shared.global [ %r9 + 0 ], [ %rd6 + 0 ], 0x10, %r10;
    add.s64 %rd7, %rd8, 64;
    mov.b64 %rd8, %rd5;
    mov.b64 %rd8, %rd7;
    add.s64 %rd6, %rd4, %rd2;
    ld.global.b64 { %rd11 }, [ %rd2 + 0 ];
    add.s64 %rd12, %rd3, %rd11;
    st.global.b16 [ %rd12 + 0 ], { %rs1 };
"""


def test_accesses_belong_to_the_parameter_that_their_address_comes_from() -> None:
    assert sorted(accesses(PTX)) == [("ld", 0, 16), ("ld", 1, 8), ("ld", 1, 16), ("st", 2, 2)]


def test_numbers_of_rows_do_not_count_as_much_as_rows() -> None:
    """Eight rows a program: each thread loads 16 bytes of elements and 20 of numbers that its row has once."""
    with FakeTensorMode():
        x = torch.empty(8192, 4096 + 128, dtype=torch.bfloat16)
        numbers = [torch.empty(8192, 1) for _ in range(5)]

    def f(x: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        return x * sum(numbers)

    report = torch_mlc.explain(f, x, *numbers, target="cuda:sm_90", options={"cache": False, "compile_workers": 0})
    (k,) = report.kernels
    assert k.resources is not None and k.resources.wide_loads < 0.9
    wide, whole = wide_bytes(k, stores=False)
    assert whole == x.numel() * 2 + 5 * 8192 * 4 and 0.99 * whole < wide < whole
    wide, whole = wide_bytes(k, stores=True)
    assert wide == whole == x.numel() * 4


def test_rows_of_an_odd_length_are_narrow() -> None:
    with FakeTensorMode():
        x = torch.empty(4096, 4097, dtype=torch.bfloat16)
    report = torch_mlc.explain(
        lambda x: torch.softmax(x, -1), x, target="cuda:sm_90", options={"cache": False, "compile_workers": 0}
    )
    assert wide_bytes(report.kernels[0], stores=False)[0] == 0
