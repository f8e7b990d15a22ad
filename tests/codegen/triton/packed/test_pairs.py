"""Half types two at a time: what the instructions make of every byte, and of every kind of number, as NumPy has it."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from torch_mlc.codegen.triton.packed.digits import Digit, digit_of
from torch_mlc.codegen.triton.packed.pairs import pair_source
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Expr, Load, Select, call, cast, const, symbol
from torch_mlc.runtime.interpreter.assembly import run_assembly

U8, I8, I32 = DType.UINT8, DType.INT8, DType.INT32
KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BYTES = np.arange(256, dtype=np.uint8)


def run(name: str, *inputs: np.ndarray) -> np.ndarray:
    """What the assembly of a device function makes of arrays, as numbers of its half type."""
    source = pair_source(name)
    assert source is not None
    text = "".join(re.findall(r'^        "(.*)"$', source, re.MULTILINE))
    pack = int(re.search(r"pack=(\d)", source)[1])  # type: ignore[index]
    made = run_assembly(text, inputs, source.count("=r"), 2, pack)
    return made.view(KINDS[name.rpartition("_")[2]])


def bits_of(words: np.ndarray, at: int, bits: int, signed: bool) -> np.ndarray:
    found = words.astype(np.int64) >> at & (1 << bits) - 1
    return np.where(found >> (bits - 1) & 1, found - (1 << bits), found) if signed else found


@pytest.mark.parametrize("half", KINDS)
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize(
    ("bits", "signed", "added"),
    [(4, False, 0), (4, False, -8), (4, True, 0), (2, False, -1), (8, True, 0), (8, False, -128)],
)
def test_bits_of_a_word_become_the_numbers_that_they_are(half, width, bits, signed, added):
    words = BYTES if width == 8 else np.random.default_rng(0).integers(0, 1 << 16, 4096).astype(np.uint16)
    for at in range(0, width - bits + 1, bits):
        sign = "plus" if added >= 0 else "minus"
        name = f"mlc_digit_{'s' if signed else 'u'}{bits}_at{at}_of{width}_{sign}{abs(added)}_{half}"
        np.testing.assert_array_equal(run(name, words).astype(np.int64), bits_of(words, at, bits, signed) + added)


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 255.0, 0.00390625)


@pytest.mark.parametrize("half", KINDS)
@pytest.mark.parametrize("fn", ["add", "sub", "mul"])
def test_arithmetic_is_that_of_float32_rounded(half, fn):
    rng = np.random.default_rng(1)
    pairs = [
        *itertools.product(SPECIAL, SPECIAL),
        *(rng.standard_normal((4096, 2)) * 2.0 ** rng.integers(-9, 9, (4096, 1))),
    ]
    a, b = (np.array(x, np.float32).astype(KINDS[half]) for x in zip(*pairs, strict=True))
    found = run(f"mlc_pair_{fn}_{half}", a.view(np.uint16), b.view(np.uint16))
    with np.errstate(all="ignore"):
        wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[fn](a.astype(np.float32), b.astype(np.float32))
        wanted = wide.astype(KINDS[half])
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    numbers = ~np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(
        np.signbit(found.astype(np.float32))[numbers], np.signbit(wanted.astype(np.float32))[numbers]
    )


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
