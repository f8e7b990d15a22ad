"""Calls that are wrong get a code and a sentence, and nothing runs: chosen ones, and a thousand random ones."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.export.models import expected, written
from torch_mlc.runtime.export import open as opened
from torch_mlc.runtime.export.open import DLTensor, LibraryError, ModelLibrary

F32 = np.float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelLibrary:
    path = tmp_path_factory.mktemp("sample")
    found = ModelLibrary(path) if written(path) is None else ModelLibrary(path, 2)
    return found


@pytest.mark.parametrize(
    ("x", "kind", "told"),
    [
        (np.zeros((3, 64, 1), F32), "tensor", "input 0 (x) has 3 dimensions; it has to have 2"),
        (np.zeros((3, 64)), "tensor", "input 0 (x) is of float64; it has to be of float32"),
        (np.zeros((3, 64), np.int32), "tensor", "input 0 (x) is of int32; it has to be of float32"),
        (np.zeros((3, 63), F32), "size", "dimension 1 of input 0 (x) is 63; it has to be 64"),
        (np.zeros((0, 64), F32), "size", "s0, dimension 0 of input 0 (x), is 0; it has to be at least 1"),
        (np.zeros((2049, 64), F32), "size", "s0, dimension 0 of input 0 (x), is 2049; it has to be at most 2048"),
        (np.zeros((7, 64), F32), "size", "s0 (dimension 0 of x) may not be 7"),
        (
            np.zeros((3, 128), F32)[:, ::2],
            "tensor",
            "the stride of dimension 1 of input 0 (x) is 2 elements; it has to be 1",
        ),
        (
            np.zeros((6, 64), F32)[::-2],
            "tensor",
            "the stride of dimension 0 of input 0 (x) is -128 elements; it has to be 64",
        ),
        (
            np.zeros(3 * 256 + 1, np.uint8)[1:].view(F32).reshape(3, 64),
            "tensor",
            "which is no multiple of 4",
        ),
    ],
)
def test_sentences(model: ModelLibrary, x: np.ndarray, kind: str, told: str) -> None:
    with pytest.raises(LibraryError) as caught:
        model.call("forward", x, np.zeros(1, np.int64))
    assert caught.value.kind == kind and told in str(caught.value) and str(caught.value).startswith("forward: ")


def test_a_wrong_index_is_told_and_the_next_call_is_right(model: ModelLibrary) -> None:
    x = np.zeros((1, 64), F32)
    context = model.context()
    for index, told in ((10, "10"), (-1, "-1"), (1 << 50, str(1 << 50))):
        with pytest.raises(LibraryError, match=rf"launch 1 was given the index {told}, .* 0 with size 10") as caught:
            context.call("forward", x, np.array([3, index]))
        assert caught.value.kind == "index"
        context.call("forward", x, np.array([3, 9]))


def test_mistakes_of_python(model: ModelLibrary) -> None:
    for arguments, told in (
        (("backward", np.zeros(1)), "sample has no function 'backward'; it has forward, twice"),
        (("twice",), r"twice takes 1 arrays \(x: float32\[s0\]\), not 0"),
        (("twice", np.array(["a"])), "x is an array of <U1; it has to be of float32"),
    ):
        with pytest.raises(LibraryError, match=told):
            model.call(*arguments)
    context = model.context()
    context.close()
    with pytest.raises(LibraryError, match="this context of sample has been closed"):
        context.call("twice", np.zeros(1, F32))


class Raw:
    """The C interface with tensors that are written field by field."""

    def __init__(self, model: ModelLibrary) -> None:
        self.model, self.context = model, model.context()
        self.functions = model._functions
        self.kept: list[object] = []

    def tensor(self, array: np.ndarray, code: int, **fields: Any) -> DLTensor:
        shape = (ctypes.c_int64 * 8)(*array.shape)
        strides = (ctypes.c_int64 * 8)(*(s // array.itemsize for s in array.strides))
        self.kept += [array, shape, strides]
        t = DLTensor(array.ctypes.data, 1, 0, array.ndim, code, array.itemsize * 8, 1, shape, strides, 0)
        for name, value in fields.items():
            setattr(t, name, value)
        return t

    def call(self, number: int, given: list[DLTensor], out: list[DLTensor]) -> tuple[int, str]:
        inputs, results = (DLTensor * len(given))(*given), (DLTensor * len(out))(*out)
        code = self.functions["call"](self.context._handle, number, inputs, results)
        return code, self.functions["error"](self.context._handle).decode()


@pytest.fixture
def raw(model: ModelLibrary) -> Raw:
    return Raw(model)


def good(raw: Raw, rows: int, taken: int) -> tuple[list[DLTensor], list[DLTensor], list[np.ndarray]]:
    raw.kept.clear()
    x, index = np.full((rows, 64), 0.5, F32), np.arange(taken) % 10
    results = [np.full((rows, 64), 9, F32), np.full((taken, 64), 9, F32), np.zeros((), np.int64)]
    given = [raw.tensor(x, 2), raw.tensor(index, 0)]
    out = [raw.tensor(results[0], 2), raw.tensor(results[1], 2), raw.tensor(results[2], 0)]
    return given, out, results


NULL = ctypes.POINTER(ctypes.c_int64)()
# Each makes one tensor wrong; the size of what it points to stays what it is.
MISTAKES: dict[str, Callable[[DLTensor, random.Random], object]] = {
    "rank": lambda t, r: setattr(t, "ndim", r.choice([-1, t.ndim + 1, t.ndim + 5, 1 << 30, -(1 << 31)])),
    "code": lambda t, r: setattr(t, "code", (t.code + r.randint(1, 255)) % 256),
    "bits": lambda t, r: setattr(t, "bits", (t.bits + r.randint(1, 255)) % 256),
    "lanes": lambda t, r: setattr(t, "lanes", r.choice([0, 2, 4, 65535])),
    "device": lambda t, r: setattr(t, "device_type", r.choice([0, 2, 4, 10, -1, 1 << 30])),
    "shape": lambda t, r: setattr(t, "shape", NULL),
    "data": lambda t, r: setattr(t, "data", None),
    "offset": lambda t, r: setattr(t, "byte_offset", r.choice([1, 2, 3])),
    "extent": lambda t, r: t.shape.__setitem__(r.randrange(t.ndim), r.choice(
        [-1, -(1 << 63), (1 << 63) - 1, 1 << 40, 1 << 47, 1 << 62, 7, 0, 2049, 3])),
    "stride": lambda t, r: t.strides.__setitem__(t.ndim - 1, r.choice([-1, 0, 2, 1 << 62, -(1 << 63)])),
}  # fmt: skip


def test_a_thousand_wrong_calls(raw: Raw) -> None:
    """Each has a code and a sentence that names function and tensor, and leaves results as they were."""
    rng = random.Random(1)
    seen: set[str] = set()
    wrong = 0
    while wrong < 1000:
        rows, taken = rng.choice([2, 3, 8, 40]), rng.choice([1, 2, 5])
        given, out, results = good(raw, rows, taken)
        before = [r.copy() for r in results]
        tensors = [*given, *out]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            name = rng.choice(sorted(MISTAKES))
            t = rng.choice(tensors)
            if (t.ndim < 1 and name in ("shape", "extent", "stride")) or (name in ("extent", "stride") and not t.shape):
                continue
            if name in ("extent", "stride") and t.ndim > 8:
                continue
            MISTAKES[name](t, rng)
        code, sentence = raw.call(0, given, out)
        if code == 0:
            # The mistake left the call right: an extent of one that has that many, a stride that means nothing.
            assert (results[0] != 9).all()
            continue
        assert code in (2, 3), (code, sentence)
        assert sentence.startswith("forward: ") and len(sentence) > 30, sentence
        for r, b in zip(results, before, strict=True):
            np.testing.assert_array_equal(r, b)
        wrong += 1
        seen.add(re.sub(r"-?\d+", "#", sentence))
    assert len(seen) > 20
    given, out, results = good(raw, 5, 2)
    assert raw.call(0, given, out) == (0, "")
    weights_free = np.exp(np.float32(0.5))
    assert np.isfinite(results[0] / weights_free).all()


def test_sizes_that_overflow_are_refused(raw: Raw) -> None:
    """A size that has no elements beside it may be any number, and nothing wraps around."""
    x = np.zeros(0, F32)
    raw.kept.clear()
    for extent in ((1 << 20) + 1, 1 << 46, (1 << 63) - 1):
        t = raw.tensor(x, 2)
        t.shape[0] = extent
        code, sentence = raw.call(1, [t], [raw.tensor(x, 2)])
        assert code == 3 and "at most 1048576" in sentence


def test_results_share_memory_with_nothing(raw: Raw) -> None:
    memory = np.zeros(30, F32)
    raw.kept.clear()
    for at, fine in ((10, True), (9, False), (0, False), (5, False)):
        code, sentence = raw.call(1, [raw.tensor(memory[:10], 2)], [raw.tensor(memory[at : at + 20], 2)])
        assert (code == 0) == fine
        assert fine or "result 0 (y) shares memory with input 0 (x)" in sentence
    given, out, _ = good(raw, 4, 4)
    out[1].data = out[0].data
    code, sentence = raw.call(0, given, out)
    assert code == 2 and "result 1 (rows) shares memory with result 0 (y)" in sentence


def test_null_pointers_and_unknown_functions(raw: Raw) -> None:
    call, error, context = raw.functions["call"], raw.functions["error"], raw.context._handle
    given, out, _ = good(raw, 2, 1)
    tensors, results = (DLTensor * 2)(*given), (DLTensor * 3)(*out)
    for arguments, told in (
        ((context, 2, tensors, results), "there is no function 2; the library has 0 to 1"),
        ((context, -1, tensors, results), "there is no function -1"),
        ((context, 0, None, results), "forward: the array of 2 inputs is a null pointer"),
        ((context, 0, tensors, None), "forward: the array of 3 results is a null pointer"),
        ((None, 0, tensors, results), "the context may not be a null pointer"),
    ):
        assert call(*arguments) == 1
        assert told in error(arguments[0]).decode()
    library = raw.model._library
    handle = ctypes.c_void_p()
    assert library.sample_open(None, None, ctypes.byref(handle)) == 1 and b"null pointers" in error(None)
    assert library.sample_open(b"x", None, None) == 1
    short = opened._Options(8, 0, None, None)
    assert library.sample_open(b"x", ctypes.byref(short), ctypes.byref(handle)) == 1
    assert b"the options have 8 bytes" in error(None)
    many = opened._Options(24, -3, None, None)
    assert library.sample_open(b"x", ctypes.byref(many), ctypes.byref(handle)) == 1 and b"-3 threads" in error(None)
    assert library.sample_context(None, ctypes.byref(handle)) == 1
    assert library.sample_shapes(None, 0, tensors, results) == 1
    library.sample_close(None)
    library.sample_close_context(None)


def test_shapes_need_room_and_no_data(raw: Raw) -> None:
    shapes, error = raw.functions["shapes"], raw.functions["error"]
    given, out, _ = good(raw, 4, 2)
    for t in given:
        t.data = None
    tensors, results = (DLTensor * 2)(*given), (DLTensor * 3)(*out)
    results[1].shape = NULL
    assert shapes(raw.model._model, 0, tensors, results) == 1
    assert b"result 1 (rows) has 2 dimensions, and there is no memory for its shape" in error(None)
    tensors[0].shape[0] = 7
    assert shapes(raw.model._model, 0, tensors, results) == 3 and b"may not be 7" in error(None)


def test_memory_that_the_system_has_not(tmp_path: Path) -> None:
    """A call that needs more scratch than there are addresses is refused, and the context goes on."""
    from dataclasses import replace

    from tests.runtime.export.models import S0, sample
    from torch_mlc.runtime.export.write import write_library

    made, weights = sample()
    greedy = replace(made.functions[1], arena=S0 * (1 << 50))
    write_library(replace(made, functions=(made.functions[0], greedy)), weights, tmp_path)
    context = ModelLibrary(tmp_path).context()
    with pytest.raises(LibraryError, match="twice: a call with these sizes needs 3377699720527872 bytes") as caught:
        context.call("twice", np.zeros(3, F32))
    assert caught.value.kind == "memory"
    with pytest.raises(LibraryError, match="do not fit into 64 bits"):
        context.call("twice", np.zeros(1 << 14, F32))
    x, index = np.zeros((2, 64), F32), np.zeros(1, np.int64)
    np.testing.assert_allclose(context.call("forward", x, index)[0], expected(weights, x, index)[0], rtol=1e-6)
