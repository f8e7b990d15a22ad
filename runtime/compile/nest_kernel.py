"""``torch_mlc.compile``: a schedule made by hand as a function of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from ...codegen.kernel import KernelSource
from ...codegen.llvm.module import emit_llvm
from ...codegen.triton.emit import emit_triton
from ...ir.nest.loops import BLOCK_KINDS, Loop, LoopKind, LoopNest, walk_nodes
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ...ir.verify.verify import verify
from ...scheduler.schedule.schedule import Schedule
from ..targets import cpu_target, named_target, target_for
from .arguments import CallError, Signature, numbers, type_text, without_bits
from .kernels import KernelCode, LoadedKernel, compile_source, load_code

Tensor: TypeAlias = torch.Tensor
# Layouts of arguments whose sizes are remembered.
_REMEMBERED = 256
_GPU_KINDS = (*BLOCK_KINDS, LoopKind.THREAD_X)


def compile(schedule: Schedule | LoopNest, target: Target | str | None = None) -> NestKernel:
    """Compile a scheduled nest, ``s`` of ``s = torch_mlc.Schedule(nest)``, to a function of tensors.

    ``target`` is a ``Target``, "cpu", "cuda" (the GPU that is here), or the name of one that need not be here
    ("cuda:sm_90", "hip:gfx942"; it compiles, and cannot be called). By default it is the GPU where loops are bound to
    ``blockIdx`` or ``threadIdx``, and this processor otherwise.

    Raises: VerifyError for a nest that is not sound, EmitError for loops that the target has no code for, TargetError,
    CpuCompileError or GpuCompileError.
    """
    nest = schedule.nest if isinstance(schedule, Schedule) else schedule
    verify(nest)
    on = target if isinstance(target, Target) else _target(nest, target)
    source = emit_triton(nest, on) if on.is_gpu else emit_llvm(nest, on)
    return NestKernel(nest, on, source, compile_source(source, on, structural_key(nest)))


def _target(nest: LoopNest, name: str | None) -> Target:
    if name is None:
        bound = any(isinstance(n, Loop) and n.kind in _GPU_KINDS for n, _ in walk_nodes(nest.body))
        name = "cuda" if bound else "cpu"
    if name == "cpu":
        return cpu_target()
    return target_for(name) if ":" not in name else named_target(name)


@dataclass(frozen=True, slots=True)
class _LayoutPlan:
    """What one layout of arguments comes to: sizes to pass, and shapes and strides of the outputs."""

    sizes: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class NestKernel:
    """A compiled nest: ``kernel(*inputs)`` takes the parameters that are not outputs, in order, and returns the
    outputs, newly allocated; one tensor where there is one, else a tuple.

    Sizes follow from the shapes and strides of the inputs. One that does not is passed by name: ``kernel(x, s1=8)``.
    Gradients are not recorded. ``nest`` is what was compiled, ``source`` its text for ``target``, ``code`` the machine
    code.
    """

    def __init__(self, nest: LoopNest, target: Target, source: KernelSource, code: KernelCode) -> None:
        self.nest, self.target, self.source, self.code = nest, target, source, code
        self.inputs = tuple(b for b in nest.params if b.name not in nest.outputs)
        self.outputs = tuple(nest.buffer(name) for name in nest.outputs)
        self._signature = Signature(nest.name, self.inputs, nest.symbols)
        self._device = "cpu" if not target.is_gpu else "cuda"
        self._plans: dict[object, _LayoutPlan] = {}

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(type_text, buffers)) for buffers in (self.inputs, self.outputs))
        return f"NestKernel({self.nest.name}({inputs}) -> ({outputs}) for {self.target})"

    @cached_property
    def _loaded(self) -> LoadedKernel:
        if self.target.is_gpu:
            here = target_for("cuda")
            if (here.kind, here.arch) != (self.target.kind, self.target.arch):
                raise CallError(f"{self.nest.name} was compiled for {self.target} and this machine's GPU is {here}")
        return load_code(self.code)

    def __call__(self, *inputs: Tensor, **sizes: int) -> Tensor | tuple[Tensor, ...]:
        """Run the kernel. Raises CallError where arguments are missing, have no memory, or are of another dtype, shape,
        stride or device than the parameters."""
        self._signature.count(inputs)
        device = self._checked(inputs)
        inputs = tuple(map(without_bits, inputs))
        key = (*((t.shape, t.stride()) for t in inputs), *sorted(sizes.items()))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _REMEMBERED:
                self._plans.clear()
            plan = self._plans[key] = self._plan(inputs, sizes)
        results = tuple(
            torch.empty_strided(shape, strides, dtype=b.dtype.torch, device=device)
            for b, (shape, strides) in zip(self.outputs, plan.outputs, strict=True)
        )
        self._run(inputs, results, plan.sizes, device)
        return results[0] if len(results) == 1 else results

    def _run(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], sizes: Sequence[int], device: torch.device
    ) -> None:
        given, made = iter(inputs), dict(zip(self.nest.outputs, results, strict=True))
        tensors = [made[b.name] if b.name in made else next(given) for b in self.nest.params]
        if self.target.is_gpu:
            with torch.cuda.device(device):
                self._loaded.call(tensors, sizes)
        else:
            self._loaded.call(*(t.data_ptr() for t in tensors), *sizes)

    def _checked(self, inputs: Sequence[Tensor]) -> torch.device:
        """The device of the inputs, which are tensors of the right types."""
        device, why = torch.device(self._device), f", as the kernel is for {self.target}"
        for b, t in zip(self.inputs, inputs, strict=True):
            self._signature.check(b, t, device, why)
            device, why = t.device, ""
        return device

    def _plan(self, inputs: Sequence[Tensor], given: dict[str, int]) -> _LayoutPlan:
        known = self._signature.sizes(inputs, given)
        layouts = tuple((numbers(b.shape, known), numbers(b.strides, known)) for b in self.outputs)
        return _LayoutPlan(numbers(self.nest.symbols.symbols, known), layouts)
