"""The kernels of a model: each once, under names that differ, and for GPUs the machine code of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import sympy

from ...codegen.export.library import Cubin, GpuVariant, KernelVariant, LaunchedKernel
from ...codegen.host.export.pointers import PointersOf
from ...codegen.host.steps.kernel_use import Grid
from ...codegen.kernel import KernelSource, wide_source
from ...ir.errors import MlcError
from ...ir.target import Target
from ...runtime.compile.compilers import Compilers, workers_for
from ...runtime.gpu.records import mask_of
from ...runtime.settings.options import Options
from ...runtime.triton.compile import GpuBinary, GpuCompileError, compile_triton, default_alignment
from ..compiling.kernels import GpuText
from .errors import ExportError


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel for one target as text. ``gpu`` is how machine code is made of it, where that is a GPU."""

    source: KernelSource
    gpu: GpuText | None = None

    @property
    def plain(self) -> str:
        """What equal kernels have in common: the text, but for the name; of GPUs also what a launch needs."""
        source = self.source
        if self.gpu is None:
            return _renamed(source.text, source.name, "")
        text = re.sub(rf"\b{re.escape(source.name)}\b", "", source.text)
        return f"{text}\n{source.meta} {source.grid} {source.symbols} {source.reach}"


@dataclass(slots=True)
class KernelPool:
    """The kernels of a model, each once, under names that differ; of each the texts for all ``targets``, which are GPUs
    or none of them."""

    targets: tuple[Target, ...]
    on_gpu: bool = False
    texts: dict[str, tuple[KernelText, ...]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def enter(self, texts: Sequence[KernelText]) -> str:
        """The name under which the pool has a kernel, of its texts for the targets."""
        first, plain = texts[0].source.name, "\n".join(t.plain for t in texts)
        if plain not in self._names:
            name = next(n for k in range(len(self.texts) + 1) if (n := first + f"_{k}" * (k > 0)) not in self.texts)
            self.texts[name] = tuple(replace(t, source=_named(t, name)) for t in texts)
            self._names[plain] = name
        return self._names[plain]

    def variants(self, called: Iterable[str]) -> tuple[KernelVariant, ...]:
        """The kernels that are called, for each processor."""
        rows = self._rows(called)
        return tuple(KernelVariant(t, tuple(row[k].source for row in rows)) for k, t in enumerate(self.targets))

    def _rows(self, called: Iterable[str]) -> list[tuple[KernelText, ...]]:
        wanted = set(called)
        return [texts for name, texts in self.texts.items() if name in wanted]


def _named(text: KernelText, name: str) -> KernelSource:
    source = text.source
    # Machine code of a GPU keeps the name that its text has: each kernel is a module.
    changed = source.text if text.gpu is not None else _renamed(source.text, source.name, name)
    return replace(source, name=name, text=changed)


def _renamed(text: str, name: str, to: str) -> str:
    # Functions of its own are called after it: @relu.main, @relu.0.member.
    return re.sub(rf"@{re.escape(name)}(?!\w)", f"@{to}", text.replace(f"; {name} for ", f"; {to} for ", 1))


def compile_gpu_kernels(
    pool: KernelPool, pointers: Mapping[str, PointersOf], options: Options
) -> tuple[GpuVariant, ...]:
    """The machine code of all kernels that are launched, for each GPU, with all variants that launches may take.

    ``pointers`` tells of each what is known of its arguments. Raises ExportError with everything that does not compile.
    """
    work = [
        (target, name, text)
        for k, target in enumerate(pool.targets)
        for name, text in ((name, texts[k]) for name, texts in pool.texts.items() if name in pointers)
    ]
    workers = workers_for(len(work), options.compile_workers)
    with Compilers(workers=workers) as compilers, ThreadPoolExecutor(max(workers, 1)) as threads:
        making = [threads.submit(_compiled, n, text, pointers[n], options, compilers) for _, n, text in work]
        made, failed = [], []
        for (target, name, _), future in zip(work, making, strict=True):
            try:
                made.append((target, future.result()))
            except MlcError as error:
                failed.append(f"{name} for {target}: {error}")
    if failed:
        raise ExportError("these kernels have no machine code:\n  " + "\n  ".join(failed))
    found = {t: tuple(kernel for target, kernel in made if target is t) for t in pool.targets}
    # The most capable first: machine code of a GPU runs on later ones of its family too.
    return tuple(GpuVariant(t, found[t]) for t in reversed(pool.targets))


def _compiled(
    name: str, text: KernelText, pointers: PointersOf, options: Options, compilers: Compilers
) -> LaunchedKernel:
    assert text.gpu is not None
    source, first = text.gpu.fitted(compilers.run_triton)
    usual = default_alignment(source)
    described = {n for n in str(source.option("descriptors", "")).split(",") if n}
    fixed = tuple(b.name in described for b in source.params)
    # What may lie anywhere; arrays that descriptors tell of have to be where they can.
    anywhere = tuple(u and (f or not o) for u, o, f in zip(usual, pointers.odd, fixed, strict=True))
    forms = [(source, False)]
    if source.reach is not None and not source.reach.is_Integer and pointers.far:
        forms.append((wide_source(source), True))
    cubins = []
    for form, far in forms:
        for aligned in dict.fromkeys((usual, anywhere)):
            known = not far and aligned == usual
            binary = first if known else _variant(form, text.gpu, aligned, compilers)
            cubins.append(_cubin(binary, far, options))
    return LaunchedKernel(replace(source, name=name), tuple(cubins), mask_of(fixed), max(first.scratch_bytes, 0))


def _variant(source: KernelSource, text: GpuText, aligned: tuple[bool, ...], compilers: Compilers) -> GpuBinary:
    try:
        return compile_triton(source, text.target, aligned, text.library, compilers.run_triton)
    except GpuCompileError:
        if text.library is None:
            raise
        return compile_triton(source, text.target, aligned, None, compilers.run_triton)  # as ``compile_source``


def _cubin(binary: GpuBinary, far: bool, options: Options) -> Cubin:
    return Cubin(
        binary.code, binary.name, mask_of(binary.aligned), far, binary.threads, binary.shared,
        len(binary.arguments) + binary.scratch, binary.dependent and options.early_launches,
    )  # fmt: skip


def scratch_of(variants: Sequence[GpuVariant], pointers: Mapping[str, PointersOf]) -> dict[str, sympy.Expr]:
    """By kernel, the bytes of scratch memory that its launches want at most, in sizes of their programs."""
    found: dict[str, sympy.Expr] = {}
    for name in [k.name for k in variants[0].kernels] if variants else ():
        kernels = [next(k for k in v.kernels if k.name == name) for v in variants]
        if any(k.scratch for k in kernels):
            found[name] = sympy.Max(*(
                k.scratch * _programs(k.source, sizes) for k in kernels for sizes in pointers[name].sizes
            ))  # fmt: skip
    return found


def _programs(source: KernelSource, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """How many programs a launch with these sizes has."""
    x, y, z = Grid(source.grid, source.symbols).of(sizes)
    return x * y * z
