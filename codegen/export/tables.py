"""What the code of a library knows of its functions: tables that the checks read, and a function for each function of
the model that computes all its sizes.

The *values* of a function are int64: shape and strides of each input, then of each result, then the bytes of its arena,
then a one for each guard that holds. Most are constants; those that depend on sizes are computed when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ...ir.expr.dtypes import DType
from ..kernel import EmitError
from .constants import Constants, struct
from .library import ExportedFunction, ExportedModel, TensorSpec
from .sizes import SizeWriter

# No tensor that has memory has a larger dimension: addresses of processes have 47 bits.
MOST = (1 << 47) - 1
STATUS_WORDS = 5

# DLPack's numbers of types (version 1.1): its code, and the bits of an element.
_FLOATS = {
    DType.BFLOAT16: 4, DType.FLOAT8_E4M3FN: 10, DType.FLOAT8_E4M3FNUZ: 11, DType.FLOAT8_E5M2: 12,
    DType.FLOAT8_E5M2FNUZ: 13, DType.FLOAT8_E8M0FNU: 14,
}  # fmt: skip

TYPES = """
; name, number of dimensions, DLPack's type (code, bits, lanes), bytes of an element, where its values begin, the texts
; of its shape and strides (null for numbers), name of the type
%Spec = type { ptr, i32, i32, i64, i64, ptr, ptr }
; name, input, dimension, least, greatest
%Size = type { ptr, i64, i64, i64, i64 }
; name; inputs; results; sizes; constant values; sentences of guards; the function that computes values; the host
; program; the place of the arena's bytes among the values
%Function = type { ptr, ptr, i64, ptr, i64, ptr, i64, ptr, i64, ptr, i64, ptr, ptr, i64 }
; place in the file, bytes, whether calls write to it
%Weight = type { i64, i64, i64 }
; data, kind and number of the device, number of dimensions, code, bits and lanes of the type, shape, strides, offset
%Tensor = type { ptr, i32, i32, i32, i8, i8, i16, ptr, ptr, i64 }
"""


def dlpack_type(dtype: DType) -> tuple[int, int]:
    """DLPack's code of a type, and the bits of an element."""
    if dtype is DType.BOOL:
        return 6, 8
    if dtype in _FLOATS:
        return _FLOATS[dtype], dtype.itemsize * 8
    code = 5 if dtype.is_complex else 2 if dtype.is_float else 0 if dtype.is_signed else 1
    return code, dtype.itemsize * 8


def type_table(constants: Constants) -> int:
    """``@types``: names of all types by DLPack's numbers; how many."""
    rows = []
    for dtype in DType:
        code, bits = dlpack_type(dtype)
        rows.append(struct(("i32", code | bits << 8 | 1 << 16), ("ptr", constants.text(dtype.value))))
    constants.array("types", "{ i32, ptr }", rows)
    return len(rows)


def function_tables(model: ExportedModel, constants: Constants) -> list[str]:
    """Functions of LLVM IR; ``constants`` gets ``@functions``, one ``%Function`` for each of the model's."""
    rows, code = [], []
    for number, f in enumerate(model.functions):
        check_function(f)
        exprs, guards = _values(f), len(f.guards)
        arena = len(exprs) - 1
        fixed = [str(int(e)) if e.is_Integer else "0" for e in exprs] + ["0"] * guards
        at = iter(_places(f))
        inputs, results = (
            constants.array(f"{word}{number}", "%Spec", [_spec(s, next(at), constants, f"{word}{number}_{k}")
                                                         for k, s in enumerate(specs)])
            for word, specs in (("inputs", f.inputs), ("results", f.results))
        )  # fmt: skip
        sizes = constants.array(f"sizes{number}", "%Size", [_size(f, s, constants) for s in f.symbols])
        values = constants.array(f"values{number}", "i64", fixed)
        rules = constants.array(f"rules{number}", "ptr", [constants.text(g.sentence) for g in f.guards])
        code.append(_compute(f, number, exprs))
        rows.append(struct(
            ("ptr", constants.text(f.name)), ("ptr", inputs), ("i64", len(f.inputs)), ("ptr", results),
            ("i64", len(f.results)), ("ptr", sizes), ("i64", len(f.symbols)), ("ptr", values), ("i64", len(fixed)),
            ("ptr", rules), ("i64", guards), ("ptr", f"@compute{number}"), ("ptr", f"@{host_symbol(model, f)}"),
            ("i64", arena),
        ))  # fmt: skip
    constants.array("functions", "%Function", rows)
    hosts = [f"declare hidden i32 @{host_symbol(model, f)}(ptr, ptr, ptr, ptr, ptr, ptr)" for f in model.functions]
    return [*hosts, *code]


def host_symbol(model: ExportedModel, f: ExportedFunction) -> str:
    """The name under which the library's code calls a host program."""
    return f"{model.name}.{f.name}"


def scratch_words(model: ExportedModel) -> int:
    """Words of int64 that the checks of any function need: values, sizes, addresses and ends of tensors, status."""
    return max(
        (
            len(_values(f)) + len(f.guards) + len(f.symbols) + 2 * (len(f.inputs) + len(f.results)) + STATUS_WORDS
            for f in model.functions
        ),
        default=0,
    )


def check_function(f: ExportedFunction) -> None:
    """Raises: EmitError where the parts of a function do not fit together."""
    for symbol, (number, dim) in f.symbols.items():
        if number >= len(f.inputs) or dim >= len(f.inputs[number].shape):
            raise EmitError(f"{f.name}: {symbol} is read at dimension {dim} of input {number}, which is not there")
        if f.inputs[number].shape[dim] != symbol:
            raise EmitError(
                f"{f.name}: {symbol} is read at dimension {dim} of input {number}, which is "
                f"{f.inputs[number].shape[dim]}; it has to be the symbol itself"
            )
    for spec in (*f.inputs, *f.results):
        if len(spec.strides) != len(spec.shape):
            raise EmitError(f"{f.name}: {spec.name} has {len(spec.shape)} dimensions and {len(spec.strides)} strides")


def _values(f: ExportedFunction) -> list[sympy.Expr]:
    found = [sympy.sympify(e) for s in (*f.inputs, *f.results) for e in (*s.shape, *s.strides)]
    return [*found, sympy.sympify(f.arena)]


def _places(f: ExportedFunction) -> list[int]:
    places, at = [], 0
    for s in (*f.inputs, *f.results):
        places.append(at)
        at += 2 * len(s.shape)
    return places


def _spec(s: TensorSpec, at: int, constants: Constants, name: str) -> str:
    code, bits = dlpack_type(s.dtype)
    shown = ["null" if sympy.sympify(e).is_Integer else constants.text(str(e)) for e in (*s.shape, *s.strides)]
    texts = constants.array(f"{name}_texts", "ptr", shown)
    return struct(
        ("ptr", constants.text(s.name)), ("i32", len(s.shape)), ("i32", code | bits << 8 | 1 << 16),
        ("i64", s.dtype.itemsize), ("i64", at), ("ptr", texts), ("ptr", constants.text(s.dtype.value)),
    )  # fmt: skip


def _size(f: ExportedFunction, symbol: sympy.Symbol, constants: Constants) -> str:
    number, dim = f.symbols[symbol]
    low, high = f.ranges.get(symbol, (0, None))
    return struct(
        ("ptr", constants.text(str(symbol))), ("i64", number), ("i64", dim), ("i64", max(low, 0)),
        ("i64", MOST if high is None else min(high, MOST)),
    )  # fmt: skip


def _compute(f: ExportedFunction, number: int, exprs: Sequence[sympy.Expr]) -> str:
    """The function that writes those values which depend on sizes."""
    writer = SizeWriter(tuple(f.symbols))
    for k, expr in enumerate(exprs):
        if not expr.is_Integer:
            _store(writer, k, writer.size(expr))
    for k, guard in enumerate(f.guards, start=len(exprs)):
        held = writer.condition(guard.condition)
        _store(writer, k, writer.value(f"zext i1 {held} to i64"))
    return "\n".join([
        f"; The values of {f.name} that depend on sizes; true where one of them cannot be computed in 64 bits.",
        f"define internal i1 @compute{number}(ptr %sizes, ptr %values) {{",
        *writer.lines,
        f"  ret i1 {writer.wrong}",
        "}",
    ])  # fmt: skip


def _store(writer: SizeWriter, place: int, value: str) -> None:
    at = writer.value(f"getelementptr inbounds i64, ptr %values, i64 {place}")
    writer.lines.append(f"  store i64 {value}, ptr {at}")
