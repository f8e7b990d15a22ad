"""Products of a library in the caller's hands, in LLVM IR: CBLAS, of which the caller tells a name or the functions.

A host program calls ``void mlc_sgemm(int64_t *arguments)`` and ``mlc_dgemm`` as it calls kernels. They take the two
operands and the result, then rows, columns and terms; of each operand how far its rows are apart, and whether it is
read the other way round; how far the result's rows are apart; how many matrices there are, and how far those of each
of the three are apart; then what the product and what is there already are multiplied with, as bits of a float64.
"""

from __future__ import annotations

from collections.abc import Sequence

from .codes import CODES, SAY, TOO_LARGE, product_symbol
from .constants import Constants
from .routine import Routine

FUNCTIONS = {"sgemm": "float", "dgemm": "double"}
"""The functions of CBLAS that are called, without "cblas_", and the type of what they multiply."""
ARGUMENTS = 17
# CBLAS's numbers of row-major matrices, and of those that are read as they are and the other way round.
_ROWS, _PLAIN, _TURNED = 101, 111, 112
_FIRST = 5
"""The first field of a model in which there is such a function."""
# Sizes are "int" in CBLAS.
_MOST = (1 << 31) - 1


def products_text(constants: Constants, functions: Sequence[str]) -> str:
    """``@find_products``, and what host programs call of ``functions``."""
    return _find(constants, functions) + "".join(_product(f) for f in functions)


def _find(constants: Constants, functions: Sequence[str]) -> str:
    t, r = constants.text, Routine()
    name = r.load("ptr", "%Options", "%options", 6)
    for function in functions:
        number = list(FUNCTIONS).index(function)
        given = r.load("ptr", "%Options", "%options", 7 + number)
        place = r.at("%Model", "%model", _FIRST + number)
        r.line(f"store ptr {given}, ptr {place}")
        with r.when(r.value(f"icmp eq ptr {given}, null"), "look"):
            with r.when(r.value(f"icmp eq ptr {name}, null"), "nameless"):
                told = t(
                    "open: this library multiplies by a library of products: name one in the options (cblas), or give "
                    f"its cblas_{function} ({function})"
                )
                r.value(f"{SAY} {told})")
                r.line(f"ret i32 {CODES['argument']}")
            library = r.value(f"call ptr @dlopen(ptr {name}, i32 2)")
            with r.when(r.value(f"icmp eq ptr {library}, null"), "missing"):
                why = r.value("call ptr @dlerror()")
                r.value(f"{SAY} {t('open: the library of products %s cannot be loaded: %s')}, ptr {name}, ptr {why})")
                r.line(f"ret i32 {CODES['library']}")
            found = r.value(f"call ptr @dlsym(ptr {library}, ptr {t(f'cblas_{function}')})")
            with r.when(r.value(f"icmp eq ptr {found}, null"), "lacking"):
                told = t(
                    f"open: the library of products %s has no cblas_{function}: it is none of CBLAS, or its functions "
                    "have other names"
                )
                r.value(f"{SAY} {told}, ptr {name})")
                r.line(f"ret i32 {CODES['library']}")
            r.line(f"store ptr {found}, ptr {place}")
    r.line("ret i32 0")
    return r.text("\n; Find the functions of a library of products. It stays loaded as long as the process lives.\n"
                  "define internal i32 @find_products(ptr %text, ptr %model, ptr %options)")  # fmt: skip


def _product(function: str) -> str:
    r, kind = Routine(), FUNCTIONS[function]
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @calling)")
    model = r.load("ptr", "%Context", r.value(f"load ptr, ptr {own}"), 0)
    multiply = r.load("ptr", "%Model", model, _FIRST + list(FUNCTIONS).index(function))
    a, b, c = (r.load("ptr", "i64", "%arguments", k) for k in range(3))
    m, n, k, a_step, b_step, c_step, a_turned, b_turned, count, a_next, b_next, c_next = (
        r.load("i64", "i64", "%arguments", p) for p in range(3, 15)
    )
    factors = []
    for place in (15, 16):
        wide = r.load("double", "i64", "%arguments", place)
        factors.append(r.value(f"fptrunc double {wide} to float") if kind == "float" else wide)
    sizes = [m, n, k, a_step, b_step, c_step]
    largest = m
    for size in sizes[1:]:
        largest = r.value(f"call i64 @llvm.umax.i64(i64 {largest}, i64 {size})")
    status = r.at("i64", "%arguments", ARGUMENTS)
    with r.when(r.value(f"icmp ugt i64 {largest}, {_MOST}"), "large"):
        r.line(f"store i64 {TOO_LARGE}, ptr {status}")
        r.store("i64", largest, "i64", status, 1)
        r.line("ret void")
    narrow = [r.value(f"trunc i64 {s} to i32") for s in sizes]
    turned = []
    for flag in (a_turned, b_turned):
        yes = r.value(f"icmp ne i64 {flag}, 0")
        turned.append(r.value(f"select i1 {yes}, i32 {_TURNED}, i32 {_PLAIN}"))
    cells = r.value(f"mul i64 {m}, {n}")
    with r.when(r.value(f"icmp eq i64 {cells}, 0"), "empty"):
        r.line("ret void")
    with r.each(count, "matrix") as number:
        moved = []
        for base, step in ((a, a_next), (b, b_next), (c, c_next)):
            moved.append(r.item(kind, base, r.value(f"mul i64 {number}, {step}")))
        r.line(
            f"call void {multiply}(i32 {_ROWS}, i32 {turned[0]}, i32 {turned[1]}, i32 {narrow[0]}, i32 {narrow[1]}, "
            f"i32 {narrow[2]}, {kind} {factors[0]}, ptr {moved[0]}, i32 {narrow[3]}, ptr {moved[1]}, i32 {narrow[4]}, "
            f"{kind} {factors[1]}, ptr {moved[2]}, i32 {narrow[5]})"
        )
    r.line("ret void")
    return r.text(f"\ndefine hidden void @{product_symbol(function)}(ptr %arguments)")
