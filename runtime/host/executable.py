"""From the text of a host program to a function that runs: names resolved, kernels in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from ...codegen.host.python.text import HostText
from ...codegen.host.python.words import OP_IN_BLOCKS, OP_OBJECT
from ...ir.errors import FreedInputError, MemoryLimitError, MlcError
from ...ir.graph.effects import resolve_op
from ..gpu.context import GpuGuard
from ..model_lines import FILE, TEXT
from ..pool.ops import in_blocks
from ..pool.pool import POOL
from .begun_copies import BEGUN, waited_for
from .control import CONTROL

Boxed = Callable[[list[Any]], Sequence[Any]]
Tensor: TypeAlias = torch.Tensor
_native = torch._C._dynamo.guards


class RuntimeFailure(MlcError, RuntimeError):
    """A compiled graph could not be put together on this machine, or an op broke what it had promised."""


def load_program(
    text: HostText, kernels: Mapping[str, Callable[..., Any]], constants: Mapping[str, Any], name: str
) -> Boxed:
    """The function of a host program: takes the list of arguments, clears it, returns a tuple.

    ``kernels`` gives loaded code by variable, ``constants`` objects by name. Raises RuntimeFailure where one is
    missing.
    """
    call: Any = waited_for(load_functions(text, constants, name, kernels)["call"], tuple(text.ops.values()))
    call._boxed_call = True
    call.__name__ = call.__qualname__ = f"mlc_{name}"
    result: Boxed = call
    return result


def load_functions(
    text: HostText, constants: Mapping[str, Any], name: str, kernels: Mapping[str, Callable[..., Any]] | None = None
) -> Mapping[str, Callable[..., Any]]:
    """The functions of a text, by name. Raises RuntimeFailure where a constant is missing."""
    namespace: dict[str, Any] = {**HELPERS, **(kernels or {})}
    for variable, target in text.ops.items():
        if target.startswith(OP_OBJECT):
            namespace[variable] = resolve_op(target.removeprefix(OP_OBJECT))
        elif target.startswith(OP_IN_BLOCKS):
            target = target.removeprefix(OP_IN_BLOCKS)
            namespace[variable] = in_blocks(target, _callable_op(target))
        else:
            namespace[variable] = constants[target] if target in constants else _callable_op(target)
    for variable, constant in text.constants.items():
        if constant not in constants:
            raise RuntimeFailure(f"{name}: the module has no constant {constant!r}")
        namespace[variable] = constants[constant]
    namespace[TEXT] = text.text
    exec(compile(text.text, f"{FILE}{name}>", "exec"), namespace)
    return namespace


# --- what the text calls --------------------------------------------------------------------------------------------


# The same kernels behind torch's argument parser, which takes half the time of a call through torch.ops.
_DIRECT: dict[str, Callable[..., Any]] = {
    "aten::mm.default": torch.mm,
    "aten::addmm.default": torch.addmm,
    "aten::bmm.default": torch.bmm,
    "aten::baddbmm.default": torch.baddbmm,
}


def _callable_op(target: str) -> Callable[..., Any]:
    """The cheapest way to call an op."""
    direct = _DIRECT.get(target) or BEGUN.get(target)
    if direct is not None:
        return direct
    if target.startswith("hop::") and target.removeprefix("hop::") in CONTROL:
        return CONTROL[target.removeprefix("hop::")]
    if target == "hop::auto_functionalized_v2":
        return _write_to_views
    op = resolve_op(target)
    # An overload does nothing but hand over to this.
    found: Callable[..., Any] = op._op if type(op) is OpOverload else op
    return found


def _write_to_views(op: Any, **kwargs: Any) -> Any:
    """An op that writes to views of ``_all_bases``, with their places told from the first element of each."""
    bases, end = kwargs["_all_bases"], "_storage_offset"
    for name in [k for k in kwargs if k.startswith("_") and k.endswith(end)]:
        base = bases[kwargs[f"{name.removesuffix(end)}_base_index"]]
        kwargs[name] += base.storage_offset()
    return torch.ops.higher_order.auto_functionalized_v2(op, **kwargs)


def _view(source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(source, size, stride, source.storage_offset() + offset)


def _empty(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _empty_cpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _empty_cuda(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_assert_size_stride: Callable[..., None] | None = getattr(_native, "assert_size_stride", None)


def _checked(result: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor in the layout that tracing promised; copied into it where it has another."""
    if result.size() != tuple(size):
        raise RuntimeFailure(
            f"a library call or a region got shape {tuple(result.size())} where tracing promised {tuple(size)}; "
            "the op's fake kernel and its real one disagree, or a size that data decide was taken for the one that the "
            "program asks of it, as expand does"
        )
    if result.stride() == tuple(stride) or result.numel() <= 1:
        return result
    if all(n <= 1 or a == b for n, a, b in zip(size, result.stride(), stride)):
        return result
    if result.is_conj():  # as tracing knew it, too
        return _checked(result.conj(), size, stride).conj()
    return torch.empty_strided(size, stride, dtype=result.dtype, device=result.device).copy_(result)


def _checked_op(result: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, op: str) -> Tensor:
    """The same of an op of the user's, whose fake kernel may be wrong in its type, too."""
    if result.size() == tuple(size) and result.dtype is dtype:
        return _checked(result, size, stride)
    raise RuntimeFailure(
        f"{op} got shape {tuple(result.size())} and type {result.dtype} where tracing promised {tuple(size)} and "
        f"{dtype}: the op's fake kernel (register_fake) and its real one disagree; "
        f"torch.library.opcheck(torch.ops.{op.replace('::', '.')}, args) shows how"
    )


def draw_seeds(count: int, device: str | torch.device) -> Tensor:
    """One random int64 for each use of random numbers, from the generator that ``torch.manual_seed`` seeds."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, device=device)


def _over_limit(peak: int, message: str) -> None:
    raise MemoryLimitError(f"{message}\nHere it would be {peak} bytes.")


def _without_memory(tensor: Tensor, least: int) -> None:
    """Of a tensor with less memory than a program reads. Raises FreedInputError, unless it has no elements."""
    if isinstance(tensor, FakeTensor):
        raise FreedInputError(
            f"an input of shape {tuple(tensor.shape)} and type {tensor.dtype} is a FakeTensor, which has no memory, "
            "and the kernels of a compiled graph read it; call the function that is not compiled with fake tensors"
        )
    if tensor.numel():
        raise FreedInputError(
            f"an input of shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()} and "
            f"type {tensor.dtype} has a storage of {tensor.untyped_storage().nbytes()} bytes, where a program reads at "
            f"least {least} from the offset on: it was resized (untyped_storage().resize_(…)), or the shape is not "
            "what was compiled for; give it memory and fill it before the call"
        )


def _with_storage(tensors: Sequence[Tensor], least: Sequence[int]) -> None:
    """Raises FreedInputError where a tensor has fewer bytes of memory behind its first element than a program reads."""
    for tensor, nbytes in zip(tensors, least, strict=True):
        if tensor.untyped_storage().nbytes() - tensor.itemsize * tensor.storage_offset() < nbytes:
            _without_memory(tensor, nbytes)


def _with_memory(tensors: Sequence[Tensor], least: Sequence[int]) -> None:
    """The same of a program that has kernels: those read tensors that only say how large their storage would be."""
    for tensor, nbytes in zip(tensors, least, strict=True):
        room = tensor.untyped_storage().nbytes() - tensor.itemsize * tensor.storage_offset()
        if room < nbytes or type(tensor) is FakeTensor:
            _without_memory(tensor, nbytes)


def _flat(results: Any) -> list[Any]:
    """The results of a call, those inside of lists, tuples and dicts too, one after the other."""
    if isinstance(results, dict):
        results = list(results.values())
    if isinstance(results, (list, tuple)):
        return [x for r in results for x in _flat(r)]
    return [results]


_bare_view: Callable[..., Tensor] = getattr(_native, "_reinterpret_tensor", _view)


def _tracked_view(source: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    if source.is_inference():  # which counts no writes, and whose views autograd does not save
        return _bare_view(source, shape, strides, offset)
    return source.as_strided(shape, strides, source.storage_offset() + offset)


HELPERS: dict[str, Any] = {
    "torch": torch,
    "math_": math,
    "empty_cpu_": getattr(_native, "_empty_strided_cpu", _empty_cpu),
    "empty_cuda_": getattr(_native, "_empty_strided_cuda", _empty_cuda) if torch.cuda.is_available() else _empty_cuda,
    "empty_": _empty,
    "block_cpu_": POOL.empty,
    "view_": _bare_view,
    "tracked_view_": _tracked_view,
    "checked_": _checked,
    "checked_op_": _checked_op,
    "flat_": _flat,
    "over_limit_": _over_limit,
    "seeds_": draw_seeds,
    "with_memory_": _with_memory,
    "with_storage_": _with_storage,
    "guard_": GpuGuard,
    "range_": torch.autograd.profiler.record_function,
}
