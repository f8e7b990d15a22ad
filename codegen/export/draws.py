"""The generator of a context, in LLVM IR: its seed and how many numbers it has drawn. Kernels make random numbers of
what is drawn here (Philox).

Source of the generator: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (SplitMix64).
"""

from __future__ import annotations

from .codes import CODES, DRAWS, SAY
from .constants import Constants
from .contexts import DRAWN, SEED
from .gpu.contexts import STREAM
from .gpu.driver import driven_anyway
from .routine import Routine

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def draws_text(name: str, constants: Constants, gpu: bool) -> str:
    """``NAME_seed``, and what host programs call for seeds."""
    return _seed(name, constants) + _draw(constants, gpu)


def _seed(name: str, constants: Constants) -> str:
    t, r = constants.text, Routine()
    with r.when(r.value("icmp eq ptr %context, null"), "nothing"):
        text = r.value("call ptr @llvm.threadlocal.address.p0(ptr @failure)")
        say = SAY.replace("%text", text)
        r.value(f"{say} {t('seed: the context may not be a null pointer')})")
        r.line(f"ret i32 {CODES['argument']}")
    r.store("i64", "%seed", "%Context", "%context", SEED)
    r.store("i64", 0, "%Context", "%context", DRAWN)
    r.line("ret i32 0")
    return "\n" + r.text(f"define i32 @{name}_seed(ptr %context, i64 %seed)")


def _draw(constants: Constants, gpu: bool) -> str:
    r = Routine()
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @calling)")
    context = r.value(f"load ptr, ptr {own}")
    target = r.load("ptr", "i64", "%arguments", 0)
    count = r.load("i64", "i64", "%arguments", 1)
    seed = r.load("i64", "%Context", context, SEED)
    drawn = r.load("i64", "%Context", context, DRAWN)
    place = r.value(f"alloca i64, i64 {count}") if gpu else target
    with r.each(count, "draw") as k:
        number = r.value(f"add i64 {drawn}, {k}")
        steps = r.value(f"mul i64 {r.value(f'add i64 {number}, 1')}, {_signed(_STEP)}")
        word = r.value(f"add i64 {seed}, {steps}")
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            mixed = r.value(f"xor i64 {word}, {r.value(f'lshr i64 {word}, {shift}')}")
            word = r.value(f"mul i64 {mixed}, {_signed(factor)}")
        word = r.value(f"xor i64 {word}, {r.value(f'lshr i64 {word}, 31')}")
        r.store("i64", word, "i64", place, k)
    r.store("i64", r.value(f"add i64 {drawn}, {count}"), "%Context", context, DRAWN)
    if gpu:
        nbytes = r.value(f"shl i64 {count}, 3")
        stream = r.load("ptr", "%Context", context, STREAM)
        to = r.load("i64", "i64", "%arguments", 0)
        status = driven_anyway(r, "cuMemcpyHtoDAsync_v2", to, place, nbytes, stream)
        with r.when(r.value(f"icmp ne i32 {status}, 0"), "failed"):
            words = r.item("i64", "%arguments", 2)
            name, function = constants.text("seeds"), constants.text("cuMemcpyHtoDAsync_v2")
            r.line(f"call void @refused(ptr {words}, i32 {status}, ptr {name}, ptr {function})")
    r.line("ret void")
    return r.text(f"\ndefine hidden void @{DRAWS}(ptr %arguments)")
