"""The functions of the suite ``kernels`` as workloads for a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch._subclasses.fake_tensor import FakeTensorMode

from ..kernels.case import VARIANTS, KernelCase
from ..kernels.registry import KERNELS
from ..models.spec import Size
from .made import HALF, Made, Workload


def _kernel(case: KernelCase, variant: str) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        shape = case.shapes["cuda" if size == "full" else "cpu"][variant]
        with FakeTensorMode():
            inputs = case.inputs(variant, "cpu", HALF, shape)
        return Made(lambda *tensors: case.function(*tensors), inputs)

    return make


KERNEL_GRAPHS: Mapping[str, Workload] = MappingProxyType({
    name: Workload(name, _kernel(case, variant), aligned=variant == "aligned")
    for case in KERNELS.values()
    for variant in VARIANTS
    for name in (f"kernels, {case.name}, {variant}",)
})  # fmt: skip
