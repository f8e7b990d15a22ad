"""Every kernel fits the processor that it is compiled for: shared memory within a block's limit, registers within a
thread's."""

from __future__ import annotations

import pytest

from tests.codegen.triton.rules.test_contractions import LARGE as CONTRACTIONS
from tests.codegen.triton.rules.test_rules import LARGE as OTHERS
from tests.scheduler import attention_functions as plain
from tests.scheduler import attention_gradients as backward
from tests.scheduler.cost.test_gpu_fit import nest
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.compiling.lighter import fitting_code
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.compile.kernels import KernelCode, compile_source, gpu_binary
from torch_mlc.runtime.triton.compile import resource_report
from torch_mlc.runtime.triton.report import ResourceReport
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
TARGETS = ("cuda:sm_75", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx90a",
           "hip:gfx942")  # fmt: skip
# Bytes that registers do not hold of kernels for heads of 256 elements, at most, on any target.
SPILLS_OF_WIDE_HEADS = 2048
# Registers kept over calls, of a division or a power, that stand outside the loops; and of the bias's gradient on
# Turing, where smaller tiles that do without take nearly twice as long (49 and 88 ms, as predicted).
SPILLS_OF_HEADS = {
    ("forward", 64, F32, "cuda:sm_90"): 8, ("bias", 128, F32, "cuda:sm_89"): 8,
    ("bias", 128, F16, "cuda:sm_75"): 256, ("bias", 128, BF16, "cuda:sm_75"): 256,
    ("bias", 256, F16, "cuda:sm_75"): 2560, ("bias", 256, BF16, "cuda:sm_75"): 2560,
}  # fmt: skip
# And of a row of 32,768 elements of half types on Turing, by the most threads that a block of one may have.
SPILLS_OF_ROWS = {(8, "cuda:sm_75"): 8}


def report(of: LoopNest, target: str) -> ResourceReport:
    """Of the code that a nest gets for a target, by its default schedule or a lighter one; raises where none fits."""
    machine = gpu_target(target)
    schedule = default_schedule(of, machine)

    def make(source: KernelSource) -> KernelCode:
        return compile_source(source, machine, "key")

    binary = gpu_binary(fitting_code(of, machine, schedule, emit_triton(schedule.nest, machine), make))
    assert binary.shared <= machine.shared_bytes
    return resource_report(binary)


# What no device would have loaded, or spilled, before tiles were chosen by the target.
FORMERLY = [
    ("keys", 128, BF16, "cuda:sm_120"), ("keys", 256, BF16, "cuda:sm_100"), ("queries", 256, BF16, "cuda:sm_89"),
    ("keys", 128, BF16, "hip:gfx942"), ("forward", 128, F32, "cuda:sm_90"), ("forward", 256, BF16, "cuda:sm_120"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "width", "dtype", "target"), FORMERLY)
def test_attention_that_fitted_no_block(kind: str, width: int, dtype: DType, target: str) -> None:
    assert report(nest(kind, width, dtype), target).spills == 0


# Heads of 96 elements, a cap on scores, and two loops with row statistics apart, each where it is tight.
OTHER_FORMS = [
    ("softcap", 96, BF16, "cuda:sm_80"), ("softcap", 96, BF16, "cuda:sm_90"), ("softcap", 96, BF16, "hip:gfx942"),
    ("keys", 64, BF16, "cuda:sm_80"), ("keys", 64, BF16, "cuda:sm_89"), ("keys", 96, BF16, "cuda:sm_80"),
    ("keys", 96, BF16, "cuda:sm_120"), ("keys", 96, BF16, "hip:gfx942"), ("keys", 96, F32, "cuda:sm_90"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "dtype", "target"), OTHER_FORMS)
def test_other_forms_of_attention(kind: str, width: int, dtype: DType, target: str) -> None:
    if kind == "softcap":
        heads = plain.Sizes(b=4, h=16, m=2048, n=2048, e=width, d=width, dtype=dtype)
        of = lower_to_loops(plain.attention(plain.SOFTCAP, heads))
    else:
        some = backward.Sizes(b=64, m=2048, n=2048, e=width, d=width, dtype=dtype, apart=True)
        of = lower_to_loops(backward.gradients(some, True))
    assert report(of, target).spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["forward", "queries", "keys", "bias"])
def test_attention_fits_every_target(kind: str, width: int, dtype: DType, target: str) -> None:
    most = SPILLS_OF_HEADS.get((kind, width, dtype, target), SPILLS_OF_WIDE_HEADS if width > 128 else 0)
    assert report(nest(kind, width, dtype), target).spills <= most


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_fit_every_target(name: str, target: str) -> None:
    report(CONTRACTIONS[name], target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", range(len(OTHERS)))
def test_other_rules_fit_every_target(place: int, target: str) -> None:
    assert report(OTHERS[place][0], target).spills <= SPILLS_OF_ROWS.get((place, target), 0)
