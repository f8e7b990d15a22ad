"""Half types in operands: what instructions over two elements, and plain arithmetic for GPUs that have none, make of
every byte and of every kind of number, as NumPy has it."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from torch_mlc.codegen.triton.packed.digits import Digit, digit_of
from torch_mlc.codegen.triton.packed.pairs import pair_source
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Expr, Load, Select, call, cast, const, symbol
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.interpreter.assembly import run_assembly

U8, I8, I32 = DType.UINT8, DType.INT8, DType.INT32
KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BYTES = np.arange(256, dtype=np.uint8)


SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
NUMPY = ("int16", "int32", "uint16", "uint32", "float16", "float32")
TL = SimpleNamespace(bfloat16=ml_dtypes.bfloat16, **{name: getattr(np, name) for name in NUMPY})


class Tile(np.ndarray):
    """An array that is converted as a tile of Triton's is."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


def run(name: str, *inputs: np.ndarray, target: Target = SM90) -> np.ndarray:
    """What a device function makes of arrays, as numbers of its type: by the assembly of NVIDIA's GPUs, elsewhere as it
    is written."""
    source = pair_source(name, target)
    assert source is not None
    if not target.has_ptx:
        names = {"tl": TL, "triton": SimpleNamespace(jit=lambda function: function)}
        exec(source, names)
        with np.errstate(all="ignore"):
            return np.asarray(names[name](*(a.view(Tile) for a in inputs)))
    text = "".join(re.findall(r'^        "(.*)"$', source, re.MULTILINE))
    pack = int(re.search(r"pack=(\d)", source)[1])  # type: ignore[index]
    made = run_assembly(text, inputs, source.count("=r"), 2, pack)
    return made.view(KINDS[name.rpartition("_")[2]])


def bits_of(words: np.ndarray, at: int, bits: int, signed: bool) -> np.ndarray:
    found = words.astype(np.int64) >> at & (1 << bits) - 1
    return np.where(found >> (bits - 1) & 1, found - (1 << bits), found) if signed else found


@pytest.mark.parametrize("target", [SM90, GFX942], ids=str)
@pytest.mark.parametrize("half", KINDS)
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize(
    ("bits", "signed", "added"),
    [(4, False, 0), (4, False, -8), (4, True, 0), (2, False, -1), (8, True, 0), (8, False, -128)],
)
def test_bits_of_a_word_become_the_numbers_that_they_are(half, width, bits, signed, added, target):
    words = BYTES if width == 8 else np.random.default_rng(0).integers(0, 1 << 16, 4096).astype(np.uint16)
    for at in range(0, width - bits + 1, bits):
        sign = "plus" if added >= 0 else "minus"
        name = f"mlc_digit_{'s' if signed else 'u'}{bits}_at{at}_of{width}_{sign}{abs(added)}_{half}"
        found = run(name, words, target=target)
        assert found.dtype == KINDS[half]
        np.testing.assert_array_equal(found.astype(np.int64), bits_of(words, at, bits, signed) + added)


@pytest.mark.parametrize("half", KINDS)
@pytest.mark.parametrize("signed", [False, True])
def test_digits_less_a_number_of_each_row(half, signed):
    words = np.random.default_rng(0).integers(0, 1 << 16, 4096).astype(np.uint16)
    power = {"bfloat16": 128, "float16": 1024}[half]
    for at, zero in itertools.product(range(0, 16, 4), (-15, 0, 7)):
        name = f"mlc_digit_{'s' if signed else 'u'}4_at{at}_of16_less_{half}"
        taken = np.full(4096, -power - 8 * signed - zero, KINDS[half])
        found = run(name, words, taken, target=GFX942)
        np.testing.assert_array_equal(found.astype(np.int64), bits_of(words, at, 4, signed) - zero)


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 255.0, 0.00390625)


@pytest.mark.parametrize("target", [SM90, GFX942], ids=str)
@pytest.mark.parametrize("half", KINDS)
@pytest.mark.parametrize("fn", ["add", "sub", "mul"])
def test_arithmetic_is_that_of_float32_rounded(half, fn, target):
    rng = np.random.default_rng(1)
    pairs = [
        *itertools.product(SPECIAL, SPECIAL),
        *(rng.standard_normal((4096, 2)) * 2.0 ** rng.integers(-9, 9, (4096, 1))),
        *((np.array([0x7F810000, 0xFFFF0000], np.uint32).view(np.float32)[k], 1.0) for k in range(2)),
        (3.3895e38, 3.3895e38), (-3.3895e38, 3.3895e38), (1e-38, 1e-39),
    ]  # fmt: skip
    a, b = (np.array(x, np.float32).astype(KINDS[half]) for x in zip(*pairs, strict=True))
    given = (a, b) if target is GFX942 else (a.view(np.uint16), b.view(np.uint16))
    found = run(f"mlc_pair_{fn}_{half}", *given, target=target)
    with np.errstate(all="ignore"):
        wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[fn](a.astype(np.float32), b.astype(np.float32))
        wanted = wide.astype(KINDS[half])
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    numbers = ~np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(
        np.signbit(found.astype(np.float32))[numbers], np.signbit(wanted.astype(np.float32))[numbers]
    )


def test_what_has_an_instruction_that_rounds_takes_it():
    for target, has in ((GFX942, False), (gpu_target("hip:gfx950"), True)):
        source = pair_source("mlc_pair_mul_bfloat16", target)
        assert source is not None and (".to(tl.bfloat16)\n" in source) is has and ("0x7FFF" in source) is not has


class Here:
    """Nothing is known of positions but that the first branch of a choice is taken."""

    def branch(self, e: Select) -> Expr | None:
        return e.if_true

    def number(self, e: Expr) -> int | None:
        return getattr(e, "value", None) if not hasattr(e, "args") else None


BYTE, SIGNED = (Load("in0", (symbol("i0"),), d) for d in (U8, I8))


def c(value: int, dtype: DType) -> Expr:
    return const(value, dtype)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (call("bit_and", BYTE, c(15, U8)), Digit(BYTE, 0, 4, False)),
        (call("shr", BYTE, c(4, U8)), Digit(BYTE, 4, 4, False)),
        (call("bit_and", call("shr", BYTE, c(2, U8)), c(3, U8)), Digit(BYTE, 2, 2, False)),
        (call("shr", SIGNED, c(4, I8)), Digit(SIGNED, 4, 4, True)),
        (call("shr", call("shl", SIGNED, c(4, I8)), c(4, I8)), Digit(SIGNED, 0, 4, True)),
        (call("bit_and", SIGNED, c(15, I8)), Digit(SIGNED, 0, 4, False)),
        (call("sub", cast(call("bit_and", BYTE, c(15, U8)), I32), c(8, I32)), Digit(BYTE, 0, 4, False, -8)),
        (Select(const(True, DType.BOOL), BYTE, c(0, U8)), Digit(BYTE, 0, 8, False)),
        # These wrap, or are no run of bits.
        (call("sub", call("bit_and", BYTE, c(15, U8)), c(8, U8)), None),
        (cast(BYTE, I8), None),
        (call("bit_and", BYTE, c(10, U8)), None),
        (call("shr", call("shl", BYTE, c(4, U8)), c(4, U8)), None),
        (call("mul", BYTE, c(2, U8)), None),
    ],
)
def test_which_bits_a_number_is(value, wanted):
    assert digit_of(value, Here()) == wanted
