"""What is exported: the functions of a model, its weights, and the text of its kernels.

A library is made of this and of nothing else. Sizes are sympy expressions in the symbols of the function that has
them, and each symbol is read off one dimension of one input when the function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ...ir.expr.dtypes import DType
from ...ir.target import Target
from ..kernel import KernelSource


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an input or result, as signatures print it: "s0", "2*s0", "64"."""

    text: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or a result of a function of the library.

    ``strides`` count elements. They are dense and row-major unless the program says otherwise.
    """

    name: str
    dtype: DType
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Its shape as signatures print it."""
        return tuple(Dimension(str(e)) for e in self.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of ``model.safetensors``: a parameter, a buffer, or a constant that was folded.

    ``strides`` count elements. The file holds the elements in the order of memory, so they have to cover
    ``product(shape)`` elements without a gap. A ``mutable`` one is a buffer that calls write to: each context has its
    own copy, made when the context is.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class Guard:
    """What must hold of sizes. It is checked before anything runs.

    ``condition`` is a boolean in size symbols, ``sentence`` what is told where it does not hold:
    "s0 (dimension 0 of tokens) has to be at most 2048".
    """

    condition: sympy.Basic
    sentence: str


@dataclass(frozen=True, slots=True)
class ExportedFunction:
    """A function of the library: "forward", "prefill".

    ``symbols`` says at which (input, dimension) each size is read. ``ranges`` are its least and greatest value, None
    where nothing bounds it. ``arena`` is the scratch that one call needs, in bytes. ``text`` is the LLVM IR of the host
    program, a module that defines ``entry`` and declares the kernels that it calls::

        i32 @entry(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status)

    ``inputs``, ``results`` and ``weights`` are arrays of data pointers in the order of the signature and of
    ``ExportedModel.weights``; ``sizes`` the values of ``symbols``, in order, as int64; ``arena`` scratch that is
    aligned to 64 bytes; ``status`` five words of int64. Results are written where the caller's memory is. It returns 0,
    or 1 where a kernel told of a wrong index: then the first four words are what kernels tell behind their arguments
    and the fifth is the number of the launch.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    symbols: Mapping[sympy.Symbol, tuple[int, int]]
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    guards: tuple[Guard, ...]
    arena: sympy.Expr
    entry: str
    text: str


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """The kernels of a model once more, for processors that can do more. They have the names of the model's."""

    target: Target
    kernels: tuple[KernelSource, ...]


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel for an NVIDIA GPU: ``entry`` is the function in ``image``.

    It takes for granted that the pointers in the mask ``assumes`` are multiples of 16 bytes, and unless it is ``far``
    that indices fit into 32 bits. ``threads`` are those of a block, ``shared`` its bytes of shared memory,
    ``parameters`` how many it has, pointers to scratch memory among them. A ``dependent`` one waits itself for the
    kernel ahead, and may be launched before that has ended.
    """

    image: bytes = field(repr=False)
    entry: str
    assumes: int
    far: bool
    threads: int
    shared: int
    parameters: int
    dependent: bool


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel for one GPU. ``cubins`` are its variants, of which a launch takes the first that is right for its
    addresses and sizes. The pointers in the mask ``described`` have to be multiples of 16 bytes in all of them, and
    each program wants ``scratch`` bytes, whose address follows the sizes among its arguments."""

    source: KernelSource
    cubins: tuple[Cubin, ...]
    described: int = 0
    scratch: int = 0

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True, slots=True)
class GpuVariant:
    """The kernels of a model for one GPU; those of all GPUs have the same names."""

    target: Target
    kernels: tuple[LaunchedKernel, ...]


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that becomes a library.

    ``name`` is an identifier of C and the prefix of what the library exports. Each of ``kernels`` is LLVM IR that
    defines ``void NAME(int64_t *arguments)`` for ``target``, the least processor that the library runs on.
    ``variants`` are tried before them when the library is opened, in their order. ``machine`` is the instruction set,
    "x86-64" or "aarch64".

    A model for GPUs has ``gpus`` and no kernels else. Its ``target`` is the processor that launches, and all tensors of
    its functions are on the GPU. The first of ``gpus`` that the device at hand can run is taken. ``products`` are the
    functions of a library for products that host programs call (``products.py``), which is found when it is opened.
    A model that ``draws`` has random numbers, of a generator that each context has.
    """

    name: str
    functions: tuple[ExportedFunction, ...]
    weights: tuple[Weight, ...]
    kernels: tuple[KernelSource, ...]
    target: Target
    variants: tuple[KernelVariant, ...] = ()
    machine: str = "x86-64"
    gpus: tuple[GpuVariant, ...] = ()
    products: tuple[str, ...] = ()
    draws: bool = False

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """What host programs call."""
        return tuple(k.name for k in (self.gpus[0].kernels if self.gpus else self.kernels))
