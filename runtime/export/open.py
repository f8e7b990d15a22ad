"""A model that was written as a library, called from Python with NumPy: no torch, and nothing else of this project.

This file works standing alone too: copy it beside a model, and ``python`` with NumPy is all that is needed::

    from open import ModelLibrary

    model = ModelLibrary("folder")
    (y,) = model.call("forward", x)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:  # NumPy's own types lack bfloat16 and those of eight bits
    import ml_dtypes
except ImportError:
    ml_dtypes = None

# DLPack's codes of types that NumPy itself does not have.
_CODES = {
    "complex32": 5, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12,
    "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14,
}  # fmt: skip
_ERRORS = {
    1: "argument", 2: "tensor", 3: "size", 4: "index", 5: "file", 6: "processor", 7: "memory", 8: "device",
    9: "library",
}  # fmt: skip


class LibraryError(RuntimeError):
    """The library refused something. ``kind`` is "argument", "tensor", "size", "index", "file", "processor", "memory",
    "device" or "library"; the text is the library's own sentence."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class DLTensor(ctypes.Structure):
    """The structure of DLPack: what a library is given of an input, and of the memory for a result."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("verify", ctypes.c_int32),
        ("cblas", ctypes.c_char_p),
        ("sgemm", ctypes.c_void_p),
        ("dgemm", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class LibraryTensor:
    """An input or a result as the library describes it. Sizes are integers, or expressions as text."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]


@dataclass(frozen=True)
class LibraryFunction:
    """A function of a library. ``sizes`` says where each symbol is read and its range; ``rules`` what has to hold."""

    name: str
    number: int
    inputs: tuple[LibraryTensor, ...]
    results: tuple[LibraryTensor, ...]
    sizes: Mapping[str, Mapping[str, int | None]]
    rules: tuple[str, ...]


class ModelLibrary:
    """A model in a folder with ``model.so`` and ``model.safetensors``.

    ``threads`` is how many threads its loops use, the calling one included; 0 is as many as the process may use
    processors. Threads may call at the same time: each has a context of its own, so that what calls change (buffers of
    the model) is the thread's own too. ``verify`` reads all weights and compares them with those of the export.
    ``cblas`` is the name or the path of a library of products ("libopenblas.so.0"), or the addresses of its functions
    by name (``{"sgemm": address}``), for models that multiply by one.

    A model for GPUs (``on_gpu``) is opened on the GPU with the number ``device``. Arrays of its calls are objects with
    ``__cuda_array_interface__``, as CuPy's and torch's are.

    Raises: LibraryError where the folder holds no library, or its weights are missing, damaged or another model's, or
    the processor lacks what the library uses, or there is no such GPU, driver or library of products.
    """

    def __init__(
        self,
        folder: str | Path,
        threads: int = 0,
        *,
        device: int = 0,
        verify: bool = False,
        cblas: str | Path | Mapping[str, int] | None = None,
    ) -> None:
        self.folder = Path(folder)
        path = self.folder / "model.so"
        try:
            self.name = _name_of(path)
            self._library = _loaded(path)
        except OSError as error:
            raise LibraryError("file", f"cannot open {path}: {error}") from error
        self._functions = {
            "open": self._function("open", ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
            "context": self._function("context", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
            "shapes": self._function("shapes", ctypes.c_int, *_CALL),
            "call": self._function("call", ctypes.c_int, *_CALL),
            "error": self._function("error", ctypes.c_char_p, ctypes.c_void_p),
            "signature": self._function("signature", ctypes.c_char_p),
            "close_context": self._function("close_context", None, ctypes.c_void_p),
            "close": self._function("close", None, ctypes.c_void_p),
        }
        self.signature: dict[str, Any] = json.loads(self._functions["signature"]().decode())
        self.functions = {f["name"]: _function_of(k, f) for k, f in enumerate(self.signature["functions"])}
        self.on_gpu, self.device = self.signature["device"] == "cuda", device
        if self.on_gpu:
            self._functions["stream"] = self._function("stream", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        if self.signature["draws"]:
            self._functions["seed"] = self._function("seed", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
        named = None if cblas is None or isinstance(cblas, Mapping) else str(cblas).encode()
        given = cblas if isinstance(cblas, Mapping) else {}
        options = _Options(
            ctypes.sizeof(_Options), threads, None, None, device, int(verify), named, given.get("sgemm"),
            given.get("dgemm"),
        )  # fmt: skip
        model = ctypes.c_void_p()
        self._check(
            self._functions["open"](str(self.folder).encode(), ctypes.byref(options), ctypes.byref(model)), None
        )
        self._model = model.value
        self._contexts = threading.local()
        self._end = weakref.finalize(self, self._functions["close"], self._model)

    def call(self, name: str, *arrays: Any, out: Sequence[Any] | None = None) -> list[Any]:
        """Call a function in the context of this thread: arrays of its results, which are new, or those of ``out``.
        Nobody makes new ones on a GPU.

        Raises: LibraryError with the library's sentence where inputs are not what the function takes.
        """
        context = getattr(self._contexts, "own", None)
        if context is None:
            context = self._contexts.own = self.context()
        result: list[Any] = context.call(name, *arrays, out=out)
        return result

    def context(self) -> LibraryContext:
        """A context of its own: scratch memory, and copies of what calls change, in their first state."""
        if not self._end.alive:
            raise LibraryError("argument", f"the library {self.name} has been closed")
        return LibraryContext(self)

    def shapes(self, name: str, *arrays: Any, outlines: bool = False) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape and strides (in elements) of each result that a call with these arrays would give. For a GPU arrays of
        NumPy's may stand for those, as ``outlines``: nobody reads their elements."""
        if not self._end.alive:
            raise LibraryError("argument", f"the library {self.name} has been closed")
        function = self.function(name)
        specs = self._counted(function, arrays)
        given = self._outlines(arrays, specs) if outlines else self._given(arrays, specs)
        out = (DLTensor * len(function.results))()
        kept = []
        for tensor, spec in zip(out, function.results):
            tensor.shape, tensor.strides = (ctypes.c_int64 * len(spec.shape))(), (ctypes.c_int64 * len(spec.shape))()
            kept.append((tensor.shape, tensor.strides))
        self._check(self._functions["shapes"](self._model, function.number, given, out), None)
        return [(tuple(t.shape[: t.ndim]), tuple(t.strides[: t.ndim])) for t in out]

    def function(self, name: str) -> LibraryFunction:
        """The function of that name. Raises: LibraryError with the names that there are."""
        found = self.functions.get(name)
        if found is None:
            raise LibraryError("argument", f"{self.name} has no function {name!r}; it has {', '.join(self.functions)}")
        return found

    def close(self) -> None:
        """Let go of the model; it ends with the last of its contexts."""
        self._contexts = threading.local()
        self._end()

    def __enter__(self) -> ModelLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, f"{self.name}_{name}")
        function.restype, function.argtypes = result, arguments
        return function

    def _given(self, arrays: Sequence[Any], specs: Sequence[LibraryTensor]) -> Any:
        described = _described_on_gpu if self.on_gpu else _described
        return _tensors([described(a, s, self.device) for a, s in zip(arrays, specs)])

    def _outlines(self, arrays: Sequence[Any], specs: Sequence[LibraryTensor]) -> Any:
        made = _tensors([_described(a, s) for a, s in zip(arrays, specs)])
        for tensor in made if self.on_gpu else ():
            tensor.device_type, tensor.device_id = 2, self.device
        return made

    def _counted(self, f: LibraryFunction, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[LibraryTensor, ...]:
        if len(arrays) != len(f.inputs):
            wanted = ", ".join(f"{s.name}: {s.dtype}[{', '.join(map(str, s.shape))}]" for s in f.inputs)
            raise LibraryError("argument", f"{f.name} takes {len(f.inputs)} arrays ({wanted}), not {len(arrays)}")
        return f.inputs

    def _check(self, code: int, context: int | None) -> None:
        if code:
            raise LibraryError(_ERRORS.get(code, "unknown"), self._functions["error"](context).decode())


class LibraryContext:
    """A context of a library: one thread at a time may call in it, and its calls see what calls before have changed."""

    def __init__(self, library: ModelLibrary) -> None:
        self._library = library
        handle = ctypes.c_void_p()
        library._check(library._functions["context"](library._model, ctypes.byref(handle)), None)
        self._handle = handle.value
        self._end = weakref.finalize(self, library._functions["close_context"], self._handle)
        self._known: dict[object, _Described] = {}

    def call(self, name: str, *arrays: Any, out: Sequence[Any] | None = None) -> list[Any]:
        """As ``ModelLibrary.call``, in this context."""
        library = self._library
        if not self._end.alive:
            raise LibraryError("argument", f"this context of {library.name} has been closed")
        function = library.function(name)
        if library.on_gpu:
            if out is None:
                raise LibraryError("argument", f"{name} is on a GPU: give arrays for its results there (out=)")
            self._count(function, out)
            self.run(
                name, library._given(arrays, library._counted(function, arrays)), library._given(out, function.results)
            )
            return [*out]
        given = [np.asarray(a) for a in arrays]
        # Arrays of the same kinds are described once; then their addresses alone are new. A call has what it describes
        # to itself, also where threads share a context, of which the library then refuses one.
        kind = (name, *[(a.shape, a.strides, a.dtype) for a in given])
        known = self._known.pop(kind, None) or _Described(library, function, given)
        if out is None:
            results = known.made()
            known.results.point_to(results)
            made = known.results.array
        else:
            self._count(function, out)
            results, made = [*out], library._given(out, function.results)
        known.inputs.point_to(given)
        self.run(name, known.inputs.array, made)
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        self._known[kind] = known
        return results

    def _count(self, function: LibraryFunction, out: Sequence[Any]) -> None:
        if len(out) != len(function.results):
            raise LibraryError(
                "argument", f"{function.name} gives {len(function.results)} arrays, and out has {len(out)}"
            )

    def seed(self, seed: int) -> None:
        """Begin the random numbers of this context anew. Raises: LibraryError for a model that has none."""
        if "seed" not in self._library._functions:
            raise LibraryError("argument", f"{self._library.name} has no random numbers")
        self._library._check(self._library._functions["seed"](self._handle, seed & (1 << 64) - 1), None)

    def stream(self, stream: int) -> None:
        """Let calls go to a CUDA stream of the caller's, a ``CUstream``, in its order; nobody waits for them then. Up
        to there a context has a stream of its own, for which each call waits. Raises: LibraryError."""
        if not self._library.on_gpu:
            raise LibraryError("argument", f"{self._library.name} is on no GPU, and has no streams")
        self._library._check(self._library._functions["stream"](self._handle, stream), self._handle)

    def run(self, name: str, inputs: Any, results: Any) -> None:
        """Call with arrays of ``DLTensor`` that the caller has filled in; their memory has to stay until it returns."""
        number = self._library.function(name).number
        code = self._library._functions["call"](self._handle, number, inputs, results)
        if code:
            own = self._library._functions["error"](self._handle)
            text = own or self._library._functions["error"](None)
            raise LibraryError(_ERRORS.get(code, "unknown"), text.decode())

    def close(self) -> None:
        """Let go of its memory."""
        self._end()


# Kinds of arguments that a context remembers.
_MOST_KINDS = 64


class _Tensors:
    """Descriptions of arrays of some kinds, of which the addresses change. The arrays themselves are not kept."""

    def __init__(self, array: Any) -> None:
        self.array = array
        array.kept = [kept[1:] for kept in array.kept]
        self._each = [array[k] for k in range(len(array))]

    def point_to(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Be of these arrays, which are of the same kinds."""
        for tensor, array in zip(self._each, arrays):
            tensor.data = array.__array_interface__["data"][0]


class _Described:
    """Arguments of one kind, and the results that they have."""

    def __init__(self, library: ModelLibrary, f: LibraryFunction, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self._places = [(s, *p) for s, p in zip(f.results, library.shapes(f.name, *arrays))]
        self.inputs = _Tensors(library._given(arrays, f.inputs))
        self.results = _Tensors(library._given(self.made(), f.results))

    def made(self) -> list[np.ndarray[Any, Any]]:
        """New arrays for the results."""
        return [_made(*place) for place in self._places]


# The first file that was loaded from each path, by device and number.
_FIRST: dict[str, tuple[int, int]] = {}


def _loaded(path: Path) -> ctypes.CDLL:
    """The library in a file. The system's loader knows libraries by their paths, and gives what it has loaded where
    another file stands now: that one is loaded by another path. Raises: OSError."""
    status = path.stat()
    file = status.st_dev, status.st_ino
    if _FIRST.setdefault(str(path), file) == file:
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, path.name)
        other.symlink_to(path.resolve())
        return ctypes.CDLL(str(other))


def _name_of(path: Path) -> str:
    """The name of the model in a library. The system's loader trusts files, so that this one is looked at before.

    Raises: LibraryError for files that are no libraries of models, or not what was written.
    """
    data = path.read_bytes()
    names = set(re.findall(rb"(?<=\0)([A-Za-z_]\w*)_signature(?=\0)", data))
    build = re.search(re.escape(b"\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0") + rb"(.{20})", data, re.DOTALL)
    if len(names) != 1 or build is None or not data.startswith(b"\x7fELF"):
        raise LibraryError("file", f"{path} is no library of a model")
    # Its build id is a hash of all the rest.
    rest = hashlib.sha256(data[: build.start(1)] + bytes(20) + data[build.end(1) :]).digest()
    if rest[:20] != build[1]:
        raise LibraryError("file", f"{path} is damaged: its content is not what its build id says")
    return names.pop().decode()


_CALL = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _function_of(number: int, f: Mapping[str, Any]) -> LibraryFunction:
    inputs, results = (
        tuple(LibraryTensor(t["name"], t["dtype"], tuple(t["shape"]), tuple(t["strides"])) for t in f[key])
        for key in ("inputs", "results")
    )
    return LibraryFunction(f["name"], number, inputs, results, f["sizes"], tuple(f["rules"]))


def _type(name: str) -> np.dtype[Any]:
    """The NumPy type of that name; where NumPy and ml_dtypes have none, unsigned integers that hold the bits."""
    try:
        return np.dtype(name)
    except TypeError:
        found = getattr(ml_dtypes, name, None)
        if found is not None:
            return np.dtype(found)
        return np.dtype({"bfloat16": np.uint16, "complex32": np.uint32}.get(name, np.uint8))


def _code(dtype: np.dtype[Any]) -> int | None:
    """DLPack's code of a type; None where it has none."""
    return _CODES.get(dtype.name, {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}.get(dtype.kind))


def _described(array: np.ndarray[Any, Any], spec: LibraryTensor, _: int = 0) -> tuple[DLTensor, tuple[object, ...]]:
    """An array as DLPack has it, and what has to live as long."""
    array = np.asarray(array)
    # Bits of a type that NumPy lacks come as integers.
    bits = array.dtype.name != spec.dtype and array.dtype == _type(spec.dtype)
    code = _CODES.get(spec.dtype) if bits else _code(array.dtype)
    if code is None:
        raise LibraryError("tensor", f"{spec.name} is an array of {array.dtype}; it has to be of {spec.dtype}")
    size = array.dtype.itemsize
    if any(s % size for s in array.strides):
        raise LibraryError("tensor", f"{spec.name} has strides of {array.strides} bytes, not of whole elements")
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(array.ndim, 1))(*(s // size for s in array.strides))
    tensor = DLTensor(array.ctypes.data, 1, 0, array.ndim, code, size * 8, 1, shape, strides, 0)
    return tensor, (array, shape, strides)


def _described_on_gpu(array: Any, spec: LibraryTensor, device: int) -> tuple[DLTensor, tuple[object, ...]]:
    """An array on a GPU as DLPack has it, by its ``__cuda_array_interface__``, which does not tell on which."""
    told = getattr(array, "__cuda_array_interface__", None)
    if told is None:
        what = type(array).__name__
        raise LibraryError("tensor", f"{spec.name} is a {what}, and no array on a GPU (with __cuda_array_interface__)")
    shape, dtype = tuple(told["shape"]), np.dtype(told["typestr"])
    outline = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, told.get("strides"))
    tensor, kept = _described(outline, spec)
    tensor.data, tensor.device_type, tensor.device_id = told["data"][0], 2, device
    return tensor, (array, *kept)


def _tensors(described: Sequence[tuple[DLTensor, tuple[object, ...]]]) -> Any:
    """An array of tensors that keeps alive what they point to."""
    array: Any = (DLTensor * max(len(described), 1))(*(t for t, _ in described))
    array.kept = [kept for _, kept in described]
    return array


def _made(spec: LibraryTensor, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """An empty array of that shape and those strides."""
    dtype = _type(spec.dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    last = sum((n - 1) * s for n, s in zip(shape, strides))
    return np.ndarray(shape, dtype, np.empty(last + 1, dtype), strides=[s * dtype.itemsize for s in strides])
