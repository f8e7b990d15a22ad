"""``torch_mlc.load``: an exported model as functions of torch's tensors, without a copy of any."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ir.errors import DivisionByZeroError, OutOfRangeError
from ...ir.expr.dtypes import DType
from ...runtime.compile.arguments import CallError
from ...runtime.export.open import DLTensor, LibraryContext, LibraryError, LibraryFunction, ModelLibrary
from ...runtime.model_lines import add_line
from .describe import DESCRIPTION
from .signature import flat_arguments, tree_of

# Kinds of arguments of which a thread remembers shapes of results.
_MOST_KINDS = 64
_LAUNCH = re.compile(r"launch (\d+)")
# DLPack's numbers of devices, and of types by how their names begin.
_KINDS = {"cpu": 1, "cuda": 2}
_SAID = {"cpu": "the CPU"}
_CODES = (
    ("uint", 1), ("int", 0), ("bfloat", 4), ("float8_e4m3fnuz", 11), ("float8_e4m3fn", 10), ("float8_e5m2fnuz", 13),
    ("float8_e5m2", 12), ("float8_e8m0fnu", 14), ("float", 2), ("complex", 5), ("bool", 6),
)  # fmt: skip


class LoadedModel:
    """An exported model: a call of it is a call of its one function, or of "forward"; ``functions`` has all by name.

    Calls take and return what the exported program does. They may come from several threads at once, and what they
    change (buffers of the model) is each thread's own. Results record no gradients. ``reset`` brings this thread's
    buffers back to what they were when the model was exported.
    """

    def __init__(self, folder: str | Path, threads: int = 0, **options: Any) -> None:
        self.library = ModelLibrary(folder, threads, **options)
        self.device = torch.device("cuda", self.library.device) if self.library.on_gpu else torch.device("cpu")
        path = Path(folder) / DESCRIPTION
        try:
            told = json.loads(path.read_text())["functions"]
        except (OSError, ValueError, KeyError) as error:
            raise CallError(f"{path}, which tells how results are laid out, cannot be read: {error}") from error
        self._own = _Own()
        self.functions: Mapping[str, LoadedFunction] = {
            name: LoadedFunction(name, self, self.library.function(name), told[name]) for name in self.library.functions
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function "forward", or the only one."""
        only = next(iter(self.functions.values())) if len(self.functions) == 1 else self.functions.get("forward")
        if only is None:
            raise CallError(f"{self.library.name} has several functions; call one of {', '.join(self.functions)}")
        return only(*args, **kwargs)

    def __getattr__(self, name: str) -> LoadedFunction:
        functions = self.__dict__.get("functions", {})
        if name not in functions:
            raise AttributeError(f"the model has no function {name!r}; it has {', '.join(functions)}")
        found: LoadedFunction = functions[name]
        return found

    def reset(self) -> None:
        """Forget what this thread's calls have changed."""
        self._own.context = None

    def seed(self, seed: int) -> None:
        """Begin the random numbers of this thread's calls anew; its first ones are those of the seed 0."""
        self.context().seed(seed)

    def context(self) -> LibraryContext:
        """Scratch and state of this thread."""
        own = self._own
        if own.context is None:
            own.context, own.stream = self.library.context(), None
        if self.library.on_gpu and own.stream != (stream := torch.cuda.current_stream(self.device).cuda_stream):
            own.context.stream(stream)
            own.stream = stream
        return own.context

    def __repr__(self) -> str:
        return f"LoadedModel({self.library.name}: {', '.join(self.functions)})"


class _Own(threading.local):
    context: LibraryContext | None = None
    stream: int | None = None


@dataclass(slots=True)
class _Prepared:
    """What a call with arguments of one kind hands to the library, but for addresses."""

    given: Any
    made: Any
    layouts: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    kept: list[Any] = field(default_factory=list)


class _Kinds(threading.local):
    def __init__(self) -> None:
        self.known: dict[Any, _Prepared] = {}


class LoadedFunction:
    """A function of an exported model: ``function(*args, **kwargs)`` of tensors on the model's device. On a GPU the
    work goes to torch's current stream, and nobody waits for it.

    Raises: CallError for arguments that it cannot take, with what it takes; OutOfRangeError for a wrong index.
    """

    def __init__(self, name: str, model: LoadedModel, told: LibraryFunction, signature: Mapping[str, Any]) -> None:
        self.name, self.signature, self.told = name, signature, told
        self._model, self._kinds = model, _Kinds()
        self._dtypes = [DType(r.dtype).torch for r in told.results]
        arguments = signature["arguments"]
        # Plain tensors in their order, which is what most programs take and what needs no look at trees.
        self._plain = signature["plain"] and all("tensor" in a for a in arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain and not kwargs and len(args) == len(self.told.inputs):
            tensors: Sequence[Any] = args
        else:
            try:
                tensors = flat_arguments(self.signature, args, kwargs)
            except TypeError as error:
                raise CallError(f"{self.name}: {error}") from None
        results = self._run(tensors)
        return tree_of(self.signature, results)

    def _run(self, tensors: Sequence[Any]) -> list[Tensor]:
        try:
            kind = tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        except (AttributeError, RuntimeError):
            kind = None
        prepared = self._kinds.known.get(kind)
        if prepared is None:
            prepared = self._prepare(tensors, kind)
        device = self._model.device
        results = [torch.empty_strided(*layout, dtype=dtype, device=device) for *layout, dtype in prepared.layouts]
        for given, t in zip(prepared.given, tensors):
            if t.device != device or t.is_neg():
                _check(self.name, tensors, self.told, device)
            given.data = t.data_ptr()
        for made, t in zip(prepared.made, results):
            made.data = t.data_ptr()
        try:
            self._model.context().run(self.name, prepared.given, prepared.made)
        except LibraryError as error:
            raise self._told(error) from None
        return results

    def _prepare(self, tensors: Sequence[Any], kind: Any) -> _Prepared:
        """Raises CallError where the function does not take such arguments."""
        _check(self.name, tensors, self.told, self._model.device)
        arrays = [_outline(t) for t in tensors]
        try:
            places = self._model.library.shapes(self.name, *arrays, outlines=True)
        except LibraryError as error:
            raise self._told(error) from None
        layouts = [(shape, strides, d) for (shape, strides), d in zip(places, self._dtypes, strict=True)]
        kept: list[Any] = []
        device = self._model.device
        given = _structures([(tuple(t.shape), t.stride(), t.dtype) for t in tensors], kept, device)
        prepared = _Prepared(given, _structures(layouts, kept, device), layouts, kept)
        known = self._kinds.known
        if len(known) >= _MOST_KINDS:
            known.clear()
        known[kind] = prepared
        return prepared

    def _told(self, error: LibraryError) -> Exception:
        """An error of the library as ours, with the line of the model where one is known."""
        if error.kind != "index":
            return CallError(str(error))
        wrong = DivisionByZeroError if "by zero" in str(error) else OutOfRangeError
        found = wrong(str(error))
        if launch := _LAUNCH.search(str(error)):
            add_line(found, self.signature["launches"][int(launch[1])])
        return found

    def __repr__(self) -> str:
        def told(specs: Sequence[Any]) -> str:
            return ", ".join(f"{s.name}: {s.dtype}[{', '.join(map(str, s.shape))}]" for s in specs)

        return f"{self.name}({told(self.told.inputs)}) -> ({told(self.told.results)})"


def _check(name: str, tensors: Sequence[Any], told: LibraryFunction, device: torch.device) -> None:
    """Raises CallError for what is no plain tensor in the memory of a device, and where there are too many or few."""
    if len(tensors) != len(told.inputs):
        wanted = ", ".join(s.name for s in told.inputs)
        raise CallError(f"{name} takes {len(told.inputs)} tensors ({wanted}), not {len(tensors)}")
    for spec, t in zip(told.inputs, tensors, strict=True):
        if not isinstance(t, Tensor):
            raise CallError(f"{name}: {spec.name} is of type {type(t).__name__}; it has to be a tensor of {spec.dtype}")
        if t.device != device or t.layout is not torch.strided or t.is_neg() or t.is_conj():
            lazy = f"{t.layout}" if t.layout is not torch.strided else "a lazy view"
            what = f"on {t.device}" if t.device != device else lazy
            raise CallError(
                f"{name}: {spec.name} is {what}; it has to be plain memory of {_SAID.get(device.type, str(device))} "
                f"(.to({str(device)!r}).clone())"
            )
        if t.dtype is not DType(spec.dtype).torch:
            raise CallError(f"{name}: {spec.name} is of {t.dtype}; it has to be of {DType(spec.dtype).torch}")


def _outline(t: Tensor) -> np.ndarray[Any, Any]:
    """An array of the layout of a tensor, of which nobody reads the elements."""
    kind = DType.from_torch(t.dtype)
    nothing = np.empty(1, kind.numpy)
    return np.lib.stride_tricks.as_strided(nothing, tuple(t.shape), [s * kind.itemsize for s in t.stride()])


def _structures(layouts: Sequence[Any], kept: list[Any], device: torch.device) -> Any:
    made = (DLTensor * max(len(layouts), 1))()
    for tensor, (shape, strides, dtype) in zip(made, layouts):
        kind = DType.from_torch(dtype)
        extents, steps = ((ctypes.c_int64 * max(len(shape), 1))(*row) for row in (shape, strides))
        tensor.device_type, tensor.ndim, tensor.lanes = _KINDS[device.type], len(shape), 1
        tensor.device_id = device.index or 0
        tensor.code = next(code for start, code in _CODES if kind.value.startswith(start))
        tensor.bits = 8 * kind.itemsize
        tensor.shape, tensor.strides = extents, steps
        kept += [extents, steps]
    return made


def load(
    folder: str | Path,
    *,
    threads: int = 0,
    device: int = 0,
    verify: bool = False,
    cblas: str | Path | Mapping[str, int] | None = None,
) -> LoadedModel:
    """An exported model, ready to be called with tensors (docs/export.md).

    ``threads`` is how many threads its loops use, the calling one included; 0 is as many as the process may use
    processors. ``device`` is the number of the GPU, of a model for GPUs. With ``verify`` all weights are read and
    compared with those of the export. ``cblas`` is the library of products that a model with ``libraries=("cblas",)``
    calls: its name or path, or its functions by name (``{"sgemm": address}``).
    Raises LibraryError where the folder holds no model that this machine can run, its weights are damaged or another
    model's, or the library of products is none.
    """
    return LoadedModel(folder, threads, device=device, verify=verify, cblas=cblas)


__all__ = ["LoadedFunction", "LoadedModel", "load"]
