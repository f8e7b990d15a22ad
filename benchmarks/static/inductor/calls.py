"""What a program of Inductor's launches: it is run over tensors without memory, and tells of each step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torch_mlc.dynamo_backend.reports.library_time import has_narrow_groups
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.graph.graph import TensorType
from torch_mlc.scheduler.facts.contraction import is_aligned, operands_of

from .capture import Program

# What the program asks of a GPU's library, which a build without one has not.
_FOREIGN = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
_VIEWS = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view", "_reshape_alias")


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor that a kernel is given: how many elements it has in memory, and of how many bytes."""

    elements: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of Inductor's by name, its text, and what it is given: arrays and numbers."""

    name: str
    text: str
    given: tuple[Array | int | float, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A library's call: operations, of elements of what type, and bytes.

    Of a product, whether the rows of its operands and of its result all begin at multiples of 16 bytes, and, where they
    do not, the bytes of each operand that has to be copied so that they do (``padded``). ``narrow`` are convolutions
    whose groups have no tiles for tensor cores.
    """

    op: str
    operations: int
    dtype: torch.dtype
    moved: int
    even_operands: bool = True
    even_result: bool = True
    padded: tuple[int, ...] = ()
    narrow: bool = False


@dataclass(slots=True)
class Calls:
    """Everything that one run of a program launches, in order."""

    launches: list[Launch] = field(default_factory=list)
    libraries: list[Call] = field(default_factory=list)


def calls_of(program: Program) -> Calls:
    """Run a program over tensors of the meta device. Raises RuntimeError for steps that have no such form."""
    found = Calls()
    with _recording(found):
        names: dict[str, Any] = {"__name__": "inductor_program", "__file__": __file__}
        exec(compile(program.text.replace(_FOREIGN, ""), "<inductor>", "exec"), names)
        names |= {
            "get_raw_stream": lambda *_: 0,
            "copy_if_misaligned": lambda t: t,
            "assert_size_stride": lambda *_: None,
            "assert_alignment": lambda *_: None,
            "empty_strided_cuda": _empty,
        }
        inputs = [_meta(t) if isinstance(t, Tensor) else t for t in program.inputs]
        with Libraries(found):
            names["call"](inputs)
    return found


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@contextlib.contextmanager
def _recording(found: Calls) -> Iterator[None]:
    def triton(_: Any, name: str, text: str, **__: Any) -> _Kernel:
        return _Kernel(name, text, found)

    with (
        mock.patch.object(AsyncCompile, "triton", triton),
        mock.patch.object(AsyncCompile, "wait", lambda *_: None),
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda *_: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "set_device", lambda *_: None),
    ):
        yield


@dataclass(frozen=True, slots=True)
class _Kernel:
    name: str
    text: str
    found: Calls

    def run(self, *given: Any, **_: Any) -> None:
        self.found.launches.append(Launch(self.name, self.text, tuple(map(_array, given))))


def _array(value: Any) -> Any:
    return Array(_held(value), value.element_size()) if isinstance(value, Tensor) else value


def _held(t: Tensor) -> int:
    """Elements in memory: of those along a dimension of stride zero there is one."""
    return math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride != 0)


class Libraries(TorchDispatchMode):
    """Notes ATen ops that read or write memory. Each reads its arguments and writes its results once."""

    def __init__(self, found: Calls) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        # A view has no bytes of its own.
        if not func.is_view and not name.startswith(_VIEWS):
            given = [t for t in pytree.tree_leaves((args, {k: v for k, v in kwargs.items() if k != "out"}))]
            read = [t for t in given if isinstance(t, Tensor)]
            made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
            asked = {k: v for k, v in kwargs.items() if k != "out"}
            operations = int(count(*args, **asked, out_val=result)) if count is not None else 0
            moved = sum(_held(t) * t.element_size() for t in [*read, *made])
            first = read[0] if read else made[0]
            narrow = has_narrow_groups(f"aten::{name}", _positional(func, args, asked))
            call = Call(name, operations, first.dtype, moved, narrow=narrow)
            operands = operands_of(f"aten::{name}.default", args)
            self._found.libraries.append(_with_rows(call, *operands, made[0]) if operands else call)
        return result


def _positional(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of an op in the order of its schema."""
    later = [named.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]]
    return (*args, *later)


def _with_rows(call: Call, a: Tensor, b: Tensor, result: Tensor) -> Call:
    axes = ((a, "mk"), (b, "kn"), (result, "mn"))
    # What has to grow is the axis along which a matrix lies in memory.
    odd = {of[-2 if t.stride(-2) == 1 else -1] for t, of in axes if not _is_even(t)}
    copied = [t for t, of in axes[:2] if not odd.isdisjoint(of)]
    return replace(
        call,
        even_operands=_is_even(a) and _is_even(b),
        even_result=_is_even(result),
        padded=tuple(_held(t) * t.element_size() for t in copied),
    )


def _is_even(t: Tensor) -> bool:
    shape, strides = (tuple(map(sympy.Integer, of)) for of in (t.shape, t.stride()))
    return is_aligned(TensorType(shape, strides, DType.from_torch(t.dtype)), SymbolTable(), typically=True)
