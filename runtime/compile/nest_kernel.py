"""``torch_mlc.compile``: a schedule made by hand as a function of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...codegen.kernel import KernelSource
from ...codegen.llvm.module import emit_llvm
from ...codegen.triton.emit import emit_triton
from ...ir.errors import MlcError
from ...ir.nest.loops import BLOCK_KINDS, Buffer, Loop, LoopKind, LoopNest, walk_nodes
from ...ir.target import Target, gpu_target
from ...ir.text.structure import structural_key
from ...ir.verify.verify import verify
from ...scheduler.schedule.schedule import Schedule
from ..targets import cpu_target, target_for
from .kernels import KernelCode, LoadedKernel, compile_source, load_code

Tensor: TypeAlias = torch.Tensor
# Layouts of arguments whose sizes are remembered.
_REMEMBERED = 256
_GPU_KINDS = (*BLOCK_KINDS, LoopKind.THREAD_X)


class CallError(MlcError, TypeError):
    """Arguments of a kernel do not fit its parameters; the text names the argument and what was wanted."""


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
    return target_for(name) if ":" not in name else gpu_target(name)


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
        self._device = "cpu" if not target.is_gpu else "cuda"
        self._plans: dict[object, _LayoutPlan] = {}

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(_type, buffers)) for buffers in (self.inputs, self.outputs))
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
        if len(inputs) != len(self.inputs):
            names = ", ".join(map(_type, self.inputs)) or "none"
            raise CallError(f"{self.nest.name} takes {len(self.inputs)} inputs ({names}), {len(inputs)} were given")
        device = self._checked(inputs)
        inputs = tuple(_negated(t) if t.is_neg() else t for t in inputs)
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
        device: torch.device | None = None
        for b, t in zip(self.inputs, inputs, strict=True):
            if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
                raise CallError(f"{self.nest.name}: {b.name} is a strided tensor, not {type(t).__name__}")
            if t.dtype is not b.dtype.torch:
                raise CallError(f"{self.nest.name}: {b.name} is of {b.dtype.torch}, the argument of {t.dtype}")
            if t.device.type != self._device or device not in (None, t.device):
                wanted = device if device is not None else f"{self._device}, as the kernel is for {self.target}"
                raise CallError(f"{self.nest.name}: {b.name} has to be on {wanted}; the argument is on {t.device}")
            if not _has_memory(t):
                raise CallError(f"{self.nest.name}: the argument for {b.name} has no memory, or not all that it shows")
            device = t.device
        return device if device is not None else torch.device(self._device)

    def _plan(self, inputs: Sequence[Tensor], given: dict[str, int]) -> _LayoutPlan:
        known = self._given(given)
        facts = [f for b, t in zip(self.inputs, inputs, strict=True) for f in self._facts(b, t)]
        _bind(known, [(expr, value) for _, expr, value in facts])
        for where, expr, value in facts:
            wanted = expr.xreplace(known)
            if wanted.is_Integer and int(wanted) != value:
                of = f" = {wanted}" if expr.free_symbols else ""
                raise CallError(f"{self.nest.name}: {where} has to be {expr}{of}, the argument's is {value}")
        for s in self.nest.symbols.sizes:
            if s.symbol not in known:
                raise CallError(
                    f"{self.nest.name}: no shape of an input tells {s.symbol}; pass it by name, {s.symbol}=…"
                )
            value = int(known[s.symbol])
            if value < s.lower or (s.upper is not None and value > s.upper) or value % s.divisor:
                told = f"from {s.lower} to {s.upper if s.upper is not None else 'any'}, divisible by {s.divisor}"
                raise CallError(f"{self.nest.name}: {s.symbol} is {value}; the code is for sizes {told}")

        def numbers(exprs: Sequence[sympy.Expr]) -> tuple[int, ...]:
            return tuple(int(e.xreplace(known)) for e in exprs)

        layouts = tuple((numbers(b.shape), numbers(b.strides)) for b in self.outputs)
        return _LayoutPlan(tuple(int(known[s]) for s in self.nest.symbols.symbols), layouts)

    def _given(self, sizes: dict[str, int]) -> dict[sympy.Symbol, sympy.Integer]:
        symbols = {s.name: s for s in self.nest.symbols.symbols}
        for name in sizes:
            if name not in symbols:
                raise CallError(f"{self.nest.name} has no size {name}; its sizes are {', '.join(symbols) or 'none'}")
            if not isinstance(sizes[name], int):
                raise CallError(f"{self.nest.name}: {name} is a whole number, not {sizes[name]!r}")
        return {symbols[name]: sympy.Integer(value) for name, value in sizes.items()}

    def _facts(self, b: Buffer, t: Tensor) -> list[tuple[str, sympy.Expr, int]]:
        """What has to hold of an argument: dimensions, and the strides of those that have several elements."""
        if t.dim() != len(b.shape):
            raise CallError(f"{self.nest.name}: {_type(b)} has {len(b.shape)} dimensions, the argument {t.dim()}")
        facts = [(f"dimension {d} of {b.name}", e, n) for d, (e, n) in enumerate(zip(b.shape, t.shape))]
        if t.numel():
            steps = zip(b.strides, t.stride(), t.shape)
            facts += [(f"stride {d} of {b.name}", e, s) for d, (e, s, n) in enumerate(steps) if n > 1]
        return facts


def _span(t: Tensor) -> int:
    """Elements from the first to the last that a tensor has."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0


def _has_memory(t: Tensor) -> bool:
    """Whether all elements are there: storages can be freed, and fakes and wrappers only say how large theirs are."""
    if not t.numel():
        return True
    room = t.untyped_storage().nbytes() - t.itemsize * t.storage_offset()
    return not isinstance(t, FakeTensor) and room >= t.itemsize * _span(t) and t.data_ptr() != 0


def _negated(t: Tensor) -> Tensor:
    """What is negative by a bit alone (``x.conj().imag``) as memory that is, in the same layout."""
    return (-torch._neg_view(t).as_strided((_span(t),), (1,))).as_strided(t.shape, t.stride(), 0)


def _bind(known: dict[sympy.Symbol, sympy.Integer], facts: Sequence[tuple[sympy.Expr, int]]) -> None:
    """Sizes from expressions whose values are known, those that are linear in one size that is still open."""
    progress = True
    while progress:
        progress = False
        for expr, value in facts:
            rest = expr.xreplace(known)
            if len(rest.free_symbols) != 1:
                continue
            (symbol,) = rest.free_symbols
            slope = sympy.expand(rest).coeff(symbol)
            at_zero = sympy.expand(rest - slope * symbol)
            if not (slope.is_Integer and slope != 0 and at_zero.is_Integer) or (value - at_zero) % slope:
                continue
            known[symbol] = (value - at_zero) // slope
            progress = True


def _type(b: Buffer) -> str:
    return f"{b.name}: {b.dtype.value}[{', '.join(map(str, b.shape))}]"
