"""Small texts of Triton as kernels, and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import sympy

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.machine_code.issue import counted_code
from torch_mlc.runtime.model.predict import Prediction, predict
from torch_mlc.runtime.model.work import ArrayTraffic, work_of
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.runtime.triton.occupancy import resident_programs

HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n@triton.jit\n"
BOTH = ("cuda:sm_90", pytest.param("cuda:sm_80", marks=pytest.mark.slow))


@dataclass(frozen=True)
class Text:
    """The body of a kernel over pointers of types, a grid, and the arrays as its programs visit them."""

    body: str
    types: tuple[DType, ...]
    grid: int
    arrays: Sequence[ArrayTraffic]
    warps: int = 4
    stages: int = 1

    def prediction(self, target: str) -> Prediction:
        goal = gpu_target(target)
        names = [f"p{k}" for k in range(len(self.types))]
        lines = "\n".join(f"    {line}" for line in self.body.strip("\n").splitlines())
        text = f"{HEAD}def f({', '.join(f'{n}_ptr' for n in names)}):\n{lines}\n"
        params = tuple(Buffer(n, (1 << 20,), (1,), t, align=16) for n, t in zip(names, self.types, strict=True))
        meta = (("index", "i32"), ("num_warps", self.warps), ("num_stages", self.stages), ("enable_fp_fusion", True))
        source = KernelSource("f", "triton", text, params, (), (sympy.Integer(self.grid),), meta)
        binary = compile_triton(source, goal)
        counted = counted_code(binary, source, {})
        assert counted is not None and not counted.guessed
        r = resource_report(binary)
        resident = resident_programs(goal.machine, r.registers, r.shared, r.threads)
        work = work_of(counted, binary, self.grid, resident, self.arrays, goal.machine)
        return predict(work, goal.machine)


def faster(better: Text, worse: Text, target: str) -> float:
    """How much longer the second takes."""
    a, b = better.prediction(target), worse.prediction(target)
    assert a.seconds < b.seconds, f"{a} {dict(a.bounds)}\n{b} {dict(b.bounds)}"
    return b.seconds / a.seconds


HALF, FLOAT, BYTE = DType.BFLOAT16, DType.FLOAT32, DType.UINT8
MB = 1 << 20
