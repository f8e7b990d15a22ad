"""Dot instructions: the table, what tensorize refuses, and machine code that has them."""

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

import torch_mlc
from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.ir.expr.dots import DOTS, USER_DOTS, DotInstruction, dots_of
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import Target
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule

# A processor of each kind: its name, features, the bytes of its vectors, LLVM's triple, and its mnemonic.
_AVX512 = "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+fma,+f16c"
KINDS = {
    "vpdpbusd.512": ("znver5", _AVX512, 64, "x86_64-linux-gnu", "vpdpbusd"),
    "vpdpbusd.256": ("x86-64", _AVX512, 32, "x86_64-linux-gnu", "vpdpbusd"),
    "vpdpbusd.vex": ("alderlake", "+avx2,+fma,+f16c,+avxvnni", 32, "x86_64-linux-gnu", "vpdpbusd"),
    "sdot": ("generic", "+neon,+dotprod", 16, "aarch64-linux-gnu", "sdot"),
}


def _product(rows, weights, activations="int8", inputs=64, outputs=48):
    torch.manual_seed(0)
    model = torch_mlc.quantize_(torch.nn.Sequential(torch.nn.Linear(inputs, outputs)), weights, 32, activations)
    with torch.no_grad():
        return torch_mlc.explain(model, torch.randn(rows, inputs)).kernels[-1].nest


def _target(name):
    arch, features, vector, _, _ = KINDS[name]
    return Target("cpu", arch, 1, vector_bytes=vector, warp=1, max_threads=1, features=features)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("rows", [1, 7])
def test_machine_code_has_the_instruction(name, weights, rows):
    nest = _product(rows, weights)
    target = _target(name)
    schedule = default_schedule(nest, target)
    assert f"'tensorize': '{name}'" in torch_mlc.show(schedule.nest)
    text = emit_llvm(schedule.nest, target).text
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    arch, features, _, triple, mnemonic = KINDS[name]
    module = llvm.parse_assembly(text)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=arch, features=features, opt=2)
    assert mnemonic in machine.emit_assembly(module)


def test_the_first_that_fits_is_taken():
    names = [d.name for d in dots_of(frozenset(("avx512vnni", "avx512vl", "avxvnni")), 64)]
    assert names[:3] == ["vpdpbusd.512", "vpdpbusd.256", "vpdpbusd.vex"]
    assert [d.name for d in dots_of(frozenset(), 32)] == ["bytes.256", "bytes.128"]


def test_what_an_instruction_means():
    rng = np.random.default_rng(0)
    dot = DOTS["vpdpbusd.256"]
    left, right = rng.integers(0, 256, (8, 4), dtype=np.uint8), rng.integers(-128, 128, (8, 4)).astype(np.int8)
    total = rng.integers(-1000, 1000, 8).astype(np.int32)
    rows = zip(total, left, right, strict=True)
    wanted = [int(t) + sum(int(a) * int(b) for a, b in zip(x, y, strict=True)) for t, x, y in rows]
    assert dot.meaning(total, left, right).tolist() == wanted


def _tiled(nest, lanes=16, depth_last=False):
    """A product whose innermost loops are those of a tile, before it is given to an instruction."""
    schedule = Schedule(nest)
    (name,) = [b for b in schedule.get_blocks() if schedule.block(b).is_reduction]
    column, *terms = schedule.get_loops(name)
    panel, lane = schedule.split(column, [None, lanes])
    order = [panel, *terms[:-1], *((lane, terms[-1]) if depth_last else (terms[-1], lane))]
    schedule.reorder(*order)
    return schedule, name, terms, lane


def test_tensorize_wants_the_sizes_of_the_instruction():
    schedule, name, _, lane = _tiled(_product(1, "int8"), lanes=8)
    schedule.vectorize(lane)
    with pytest.raises(ScheduleError, match="runs 8 times"):
        schedule.tensorize(name, "vpdpbusd.512")


def test_tensorize_wants_scales_outside_of_a_sum():
    schedule, name, _, lane = _tiled(_product(1, "int8"))
    schedule.vectorize(lane)
    with pytest.raises(ScheduleError, match="a factor differs among terms"):
        schedule.tensorize(name, "vpdpbusd.512")


def test_tensorize_wants_parts_of_a_word_written_out():
    schedule, name, terms, lane = _tiled(_product(1, "int4"))
    schedule.vectorize(lane)
    schedule.annotate(terms[0], "factor", True)
    schedule.annotate(terms[1], "cascade", True)
    schedule.annotate(terms[1], "factor", True)
    with pytest.raises(ScheduleError, match=r"does not hold 4 bytes|may end before"):
        schedule.tensorize(name, "vpdpbusd.512")
    schedule.unroll(terms[2])
    schedule.tensorize(name, "vpdpbusd.512")
    with pytest.raises(ScheduleError, match="would be tensorized"):
        schedule.split(terms[-1], [None, 2])


def test_tensorize_wants_whole_numbers():
    schedule, name, _, lane = _tiled(_product(1, "int8", activations=None))
    schedule.vectorize(lane)
    with pytest.raises(ScheduleError, match="the operand that lanes share is no int8"):
        schedule.tensorize(name, "vpdpbusd.512")
    with pytest.raises(ScheduleError, match=r"there is no intrinsic 'vpdp'; there are .*vpdpbusd.512"):
        schedule.tensorize(name, "vpdp")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"left": "float32"}, "the left operand is uint8 or int8"),
        ({"right": "uint8"}, "the right one int8"),
        ({"left": "byte"}, "types are named as torch names them"),
        ({"llvm": "vpdpbusd"}, "begin with 'llvm.'"),
        ({"lanes": 12}, "lanes are a power of two"),
        ({"depth": 2}, "a lane has four bytes"),
        ({"name": "sdot"}, "there is an instruction 'sdot' already"),
        ({"name": "a b"}, "a name is letters"),
    ],
)
def test_wrong_declarations_are_told(changed, told):
    declared = {"name": "mine", "llvm": "llvm.mine", "feature": "f", "lanes": 8, "depth": 4, **changed}
    with pytest.raises(torch_mlc.RegistrationError, match=told):
        torch_mlc.register_dot(declared.pop("name"), **declared)
    assert not USER_DOTS


def test_a_declared_instruction_is_used_and_taken_back():
    nest, target = _product(3, "int8"), cpu_target()
    features = target.features.replace("+avx512vnni", "").replace("+avxvnni", "")
    without = Target("cpu", target.arch, 1, vector_bytes=32, warp=1, max_threads=1, features=f"{features},+mine")
    assert "'tensorize': 'bytes.256'" in torch_mlc.show(default_schedule(nest, without).nest)
    with torch_mlc.register_dot("mine", llvm="llvm.x86.avx512.vpdpbusd.256", feature="mine", lanes=8, depth=4) as mine:
        assert mine.value == DotInstruction(
            "mine", "mine", 8, 4, DType.UINT8, DType.INT8, DType.INT32, "llvm.x86.avx512.vpdpbusd.256"
        )
        assert "'tensorize': 'mine'" in torch_mlc.show(default_schedule(nest, without).nest)
    assert "mine" not in DOTS
