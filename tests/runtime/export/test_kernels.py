"""What kernels of the emitter want of the system: nothing but what a library may have."""

from __future__ import annotations

import itertools

import pytest

from tests.runtime.export.models import ARM, V3, kernel
from torch_mlc.codegen.elf.read import read_object
from torch_mlc.codegen.export.platform import platform_of
from torch_mlc.codegen.export.processor import compiled_for
from torch_mlc.codegen.export.runtime import IMPORTS
from torch_mlc.ir.target import Target
from torch_mlc.runtime.cpu import compile_object

OPENMP = {"GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"}
FAST = Target("cpu", "x86-64-v3", 4, vector_bytes=32, features="+avx2,+fma,+f16c")
CONVERT = """
@nest(outputs=["out0"])
def convert(in0: {a}[s0, 64], out0: {b}[s0, 64]):
    s0 = size()
    for x in parallel(s0):
        for y in serial(64):
            with block("b0"):
                x0 = spatial(s0, x)
                x1 = spatial(64, y)
                out0[x0, x1] = {value}
"""
TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool")


def wanted(text: str, target: Target, machine: str) -> set[str]:
    arch, features = compiled_for(target, machine)
    code = compile_object(
        [kernel(text, target).text],
        Target("cpu", arch, 4, vector_bytes=target.vector_bytes, features=features),
        triple=platform_of(machine).triple,
    )
    return {s.name for s in read_object(code, "kernel").symbols if s.section is None and s.name and not s.is_local}


@pytest.mark.parametrize(("target", "machine"), [(V3, "x86-64"), (FAST, "x86-64"), (ARM, "aarch64")])
@pytest.mark.parametrize("a", TYPES)
def test_conversions_need_no_library(target: Target, machine: str, a: str) -> None:
    for b in TYPES:
        if a != b:
            text = CONVERT.format(a=a, b=b, value=f"cast(in0[x0, x1], {b})")
            assert wanted(text, target, machine) <= OPENMP


@pytest.mark.parametrize(("target", "machine"), [(V3, "x86-64"), (ARM, "aarch64")])
def test_functions_are_those_of_the_library_of_mathematics(target: Target, machine: str) -> None:
    """Where no vectors of Sleef's are asked for: what is left is libm's, for each element."""
    for name, kind in itertools.product(("exp", "sin", "tanh", "log1p", "erf", "lgamma"), ("float32", "float64")):
        text = CONVERT.format(a=kind, b=kind, value=f"{name}(in0[x0, x1])")
        assert wanted(text, target, machine) <= OPENMP | IMPORTS, name
