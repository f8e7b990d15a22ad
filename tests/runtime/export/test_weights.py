"""Files of weights: what the format asks for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.export.models import sample, written
from torch_mlc.codegen.export.library import Weight
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.runtime.export.open import LibraryError, ModelLibrary
from torch_mlc.runtime.export.safetensors import WeightError, plan_weights
from torch_mlc.runtime.export.write import data_hash

WEIGHTS = (
    Weight("a", DType.INT8, (3,), (1,)),
    Weight("none", DType.FLOAT32, (0, 5), (5, 1)),
    Weight("turned", DType.FLOAT32, (4, 5, 6), (5, 1, 20)),
    Weight("one", DType.BFLOAT16, (1, 7), (99, 1)),
    Weight("scalar", DType.FLOAT64, (), ()),
)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {w.name: (np.asarray(rng.normal(size=w.shape)) * 50).astype(w.dtype.numpy).reshape(w.shape) for w in WEIGHTS}


def test_the_file_is_what_the_format_asks_for(tmp_path: Path) -> None:
    plan = plan_weights(WEIGHTS)
    given = arrays()
    plan.write(tmp_path / "w", given)
    data = (tmp_path / "w").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0 and len(data) == 8 + length + plan.placed.data_bytes
    # No holes and no overlaps, and each tensor of the model at a multiple of 64.
    ends = 0
    for entry in sorted(header.values(), key=lambda e: (e["data_offsets"][0], e["data_offsets"][1])):
        assert entry["data_offsets"][0] == ends
        ends = entry["data_offsets"][1]
    assert ends == plan.placed.data_bytes
    for weight, (at, size) in zip(WEIGHTS, plan.placed.places, strict=True):
        entry = header[weight.name]
        assert at % 64 == 0 and [at - 8 - length, at - 8 - length + size] == entry["data_offsets"]
        stored = np.frombuffer(data, weight.dtype.numpy, int(np.prod(weight.shape)), at)
        strides = [s * weight.dtype.itemsize for s in weight.strides]
        seen = np.lib.stride_tricks.as_strided(stored, weight.shape, strides) if stored.size else stored.reshape(0, 5)
        np.testing.assert_array_equal(seen, given[weight.name])
        np.testing.assert_array_equal(
            stored.reshape(entry["shape"]).ravel(), seen.transpose(np.argsort(weight.strides)[::-1]).ravel()
        )


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for weight, told in (
        (Weight("w", DType.FLOAT32, (3, 4), (8, 1)), "leave gaps or overlap"),
        (Weight("w", DType.FLOAT32, (3, 4), (0, 1)), "leave gaps or overlap"),
        (Weight("w", DType.FLOAT32, (3, 4), (4,)), "has the 2 dimensions"),
        (Weight("w", DType.COMPLEX128, (3,), (1,)), "no name for elements of complex128"),
    ):
        with pytest.raises(WeightError, match=told):
            plan_weights([weight])
    plan, given = plan_weights(WEIGHTS), arrays()
    with pytest.raises(WeightError, match="the weight one is missing among a"):
        plan.write(tmp_path / "w", {k: v for k, v in given.items() if k != "one"})
    with pytest.raises(WeightError, match=r"the weight a is int8\[4\]; the model has int8\[3\]"):
        plan.write(tmp_path / "w", {**given, "a": np.zeros(4, np.int8)})


def test_data_are_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    """Any bit of any weight that differs is found; without that other values with the same header are taken."""
    written(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    ModelLibrary(tmp_path, verify=True).close()
    rng = np.random.default_rng(0)
    for place in (first, len(whole) - 1, *rng.integers(first, len(whole), 60)):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.integers(8)
        path.write_bytes(changed)
        with pytest.raises(LibraryError, match="are not those that the model was exported with: they are damaged") as e:
            ModelLibrary(tmp_path, verify=True)
        assert e.value.kind == "file"
    signs = bytearray(whole)  # what changes in two words is not made up for in the hash
    for place in (first + 64 + 7, first + 64 + 7 + 64):
        signs[place] ^= 0x80
    path.write_bytes(signs)
    with pytest.raises(LibraryError, match="are damaged"):
        ModelLibrary(tmp_path, verify=True)
    ModelLibrary(tmp_path).close()


def test_the_hash_is_the_files(tmp_path: Path) -> None:
    model, weights = sample()
    plan = plan_weights(model.weights)
    plan.write(tmp_path / "file", weights)
    data = (tmp_path / "file").read_bytes()[plan.placed.first :]
    prime, ones = 0x100000001B3, (1 << 64) - 1
    lanes = [0xCBF29CE484222325] * 8
    for k, word in enumerate(np.frombuffer(data, "<u8")):
        h = (lanes[k % 8] ^ int(word)) * prime & ones
        lanes[k % 8] = h ^ h >> 32
    wanted = len(data)
    for lane in lanes:
        wanted = (wanted ^ lane) * prime & ones
        wanted ^= wanted >> 32
    assert data_hash(tmp_path / "file", plan.placed) == wanted
