"""What is checked of the tensors of a call, in LLVM IR. Nothing runs before all of it holds."""

from __future__ import annotations

from ..constants import Constants
from ..routine import Routine
from .kinds import kinds_text, sizes_text
from .layouts import data_text, layouts_text

# Fields of a function's row: its inputs and results, each with their number.
_INPUTS, _RESULTS = (1, 2), (3, 4)


def checks_text(constants: Constants, types: int, gpu: bool = False) -> str:
    """The functions that check one tensor, and those that check all of a call; ``@types`` has so many rows."""
    one = [
        kinds_text(constants, types, gpu),
        sizes_text(constants),
        layouts_text(constants),
        data_text(constants),
    ]
    return "".join([*one, _check_inputs(), _check_memory()])


def _specs(r: Routine, which: tuple[int, int]) -> tuple[str, str]:
    return r.load("ptr", "%Function", "%f", which[0]), r.load("i64", "%Function", "%f", which[1])


def _check_inputs() -> str:
    r = Routine()
    specs, count = _specs(r, _INPUTS)
    with r.each(count, "kind") as k:
        spec, tensor = r.item("%Spec", specs, k), r.item("%Tensor", "%in", k)
        r.passed(f"@check_kind(ptr %text, ptr %f, ptr @word_input, i64 {k}, ptr {spec}, ptr {tensor})")
    r.passed("@read_sizes(ptr %text, ptr %f, ptr %in, ptr %sizes)")
    r.passed("@compute_values(ptr %text, ptr %f, ptr %sizes, ptr %values)")
    with r.each(count, "layout") as k:
        spec, tensor = r.item("%Spec", specs, k), r.item("%Tensor", "%in", k)
        r.passed(f"@check_layout(ptr %text, ptr %f, ptr @word_input, i64 {k}, ptr {spec}, ptr {tensor}, ptr %values)")
    r.line("ret i32 0")
    return r.text(
        "\n; Kinds, sizes, values, guards and layouts of the inputs: all that the shapes of results need.\n"
        "define internal i32 @check_inputs(ptr %text, ptr %f, ptr %in, ptr %values, ptr %sizes)"
    )


def _check_memory() -> str:
    r = Routine()
    specs, count = _specs(r, _INPUTS)
    results, results_count = _specs(r, _RESULTS)
    with r.each(count, "data") as k:
        spec, tensor = r.item("%Spec", specs, k), r.item("%Tensor", "%in", k)
        address, end = r.item("ptr", "%inputs", k), r.item("ptr", "%input.ends", k)
        r.passed(
            f"@check_data(ptr %text, ptr %f, ptr @word_input, i64 {k}, ptr {spec}, ptr {tensor}, ptr %values, "
            f"ptr {address}, ptr {end})"
        )
    with r.each(results_count, "result") as k:
        spec, tensor = r.item("%Spec", results, k), r.item("%Tensor", "%out", k)
        address, end = r.item("ptr", "%results", k), r.item("ptr", "%result.ends", k)
        one = f"ptr %text, ptr %f, ptr @word_result, i64 {k}, ptr {spec}, ptr {tensor}"
        r.passed(f"@check_kind({one})")
        r.passed(f"@check_layout({one}, ptr %values)")
        r.passed(f"@check_data({one}, ptr %values, ptr {address}, ptr {end})")
        start, stop = (r.value(f"load ptr, ptr {place}") for place in (address, end))
        for word, number, rows, begins, ends in (
            ("input", count, specs, "%inputs", "%input.ends"), ("result", k, results, "%results", "%result.ends"),
        ):  # fmt: skip
            r.passed(
                f"@check_apart(ptr %text, ptr %f, i64 {k}, ptr {spec}, ptr {start}, ptr {stop}, ptr @word_{word}, "
                f"i64 {number}, ptr {rows}, ptr {begins}, ptr {ends})"
            )
    r.line("ret i32 0")
    return r.text(
        "\n; Data of the inputs, and kinds, layouts and data of the results, which share memory with nothing.\n"
        "define internal i32 @check_memory(ptr %text, ptr %f, ptr %in, ptr %out, ptr %values, ptr %inputs,\n"
        "                                  ptr %results, ptr %input.ends, ptr %result.ends)"
    )
