"""A kernel over a table: one native call does the work of many calls of one function.

The arguments are the number of rows, then for each row its pointers and sizes. The work of all rows is laid end to end
and cut into equal shares for one team of threads, wherever a row ends.
"""

from __future__ import annotations

import sympy

from ...ir.expr.dtypes import DType
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from .memory.index import scalar_index
from .text.builder import Builder, Val
from .text.context import Context

I64 = DType.INT64


def size_function(
    nest: LoopNest, target: Target, name: str, value: sympy.Expr, features: frozenset[str]
) -> tuple[str, dict[str, str]]:
    """A function of the size symbols that gives ``value``, and what it declares."""
    symbols = nest.symbols.symbols
    parameters = ", ".join(f"i64 %{s.name}" for s in symbols)
    b = Builder(f"define internal i64 @{name}({parameters})", features)
    ctx = Context(nest, target, b, {}, {s: Val(f"%{s.name}", I64) for s in symbols})
    b.line(f"ret i64 {scalar_index(ctx, sympy.expand(value)).name}")
    return b.text("#0 "), b.declarations


def table_driver(nest: LoopNest, target: Target, grain: int, status: str = "") -> str:
    """The entry of a kernel over a table and what each thread of its team runs.

    They call ``@<name>.part(pointers, sizes, low, high)``, ``@<name>.extent(sizes)`` (how many iterations a row has)
    and ``@<name>.work(sizes)`` (operations of a row). ``status`` names what ``part`` takes after the sizes, the numbers
    behind the arguments in which it tells of an index that is out of range.
    """
    name = nest.name
    pointers, sizes = len(nest.params), len(nest.symbols.symbols)
    width = pointers + sizes
    row = [
        *(f"  %p{k}.at = getelementptr inbounds i64, ptr %row, i64 {k}" for k in range(width)),
        *(f"  %p{k} = load ptr, ptr %p{k}.at, align 8" for k in range(pointers)),
        *(f"  %p{k} = load i64, ptr %p{k}.at, align 8" for k in range(pointers, width)),
    ]
    sizes_only = [line for k in range(pointers, width) for line in (row[k], row[width + k])]
    given = ", ".join(f"i64 %p{k}" for k in range(pointers, width))
    passed = ", ".join([f"ptr %p{k}" for k in range(pointers)] + ([given] if given else []))
    behind = []
    if status:
        passed += f", ptr %{status}"
        behind = [
            f"  %cells = mul nuw i64 %count, {width}",
            f"  %{status} = getelementptr inbounds i64, ptr %table, i64 %cells",
        ]
    first = "  %table = getelementptr inbounds i64, ptr %arguments, i64 1"
    team = "true" if target.cores > 1 else "false"
    return "\n".join([
        # The share of a thread, in iterations of all rows.
        f"define internal void @{name}.share(ptr %arguments, i64 %low, i64 %high) #0 {{",
        "entry:",
        "  %count = load i64, ptr %arguments, align 8",
        first,
        *behind,
        "  %some = icmp sgt i64 %count, 0",
        "  br i1 %some, label %each, label %done",
        "each:",
        "  %k = phi i64 [ 0, %entry ], [ %next, %after ]",
        "  %begin = phi i64 [ 0, %entry ], [ %end, %after ]",
        f"  %offset = mul nuw i64 %k, {width}",
        "  %row = getelementptr inbounds i64, ptr %table, i64 %offset",
        *row,
        f"  %extent = call i64 @{name}.extent({given})",
        "  %end = add i64 %begin, %extent",
        "  %from = call i64 @llvm.smax.i64(i64 %low, i64 %begin)",
        "  %until = call i64 @llvm.smin.i64(i64 %high, i64 %end)",
        "  %mine = icmp slt i64 %from, %until",
        "  br i1 %mine, label %run, label %after",
        "run:",
        "  %lower = sub i64 %from, %begin",
        "  %upper = sub i64 %until, %begin",
        f"  call void @{name}.part({passed}, i64 %lower, i64 %upper)",
        "  br label %after",
        "after:",
        "  %next = add nuw i64 %k, 1",
        "  %more = icmp slt i64 %next, %count",
        "  %left = icmp slt i64 %end, %high",
        "  %go = and i1 %more, %left",
        "  br i1 %go, label %each, label %done",
        "done:",
        "  ret void",
        "}",
        "",
        f"define internal void @{name}.member(ptr %data) #0 {{",
        "entry:",
        "  %arguments = load ptr, ptr %data, align 8",
        "  %total.at = getelementptr inbounds i64, ptr %data, i64 1",
        "  %total = load i64, ptr %total.at, align 8",
        "  %id32 = call i32 @omp_get_thread_num()",
        "  %threads32 = call i32 @omp_get_num_threads()",
        "  %id = zext i32 %id32 to i64",
        "  %threads = zext i32 %threads32 to i64",
        "  %most = sub nuw i64 %threads, 1",
        "  %padded = add nuw i64 %total, %most",
        "  %share = udiv i64 %padded, %threads",
        "  %low = mul nuw i64 %id, %share",
        "  %until = add nuw i64 %low, %share",
        "  %high = call i64 @llvm.smin.i64(i64 %total, i64 %until)",
        f"  call void @{name}.share(ptr %arguments, i64 %low, i64 %high)",
        "  ret void",
        "}",
        "",
        f"define void @{name}(ptr %arguments) #0 {{",
        "entry:",
        "  %count = load i64, ptr %arguments, align 8",
        first,
        "  %data = alloca [2 x i64], align 8",
        "  %some = icmp sgt i64 %count, 0",
        "  br i1 %some, label %each, label %done",
        "each:",
        "  %k = phi i64 [ 0, %entry ], [ %next, %each ]",
        "  %extents = phi i64 [ 0, %entry ], [ %total, %each ]",
        "  %works = phi i64 [ 0, %entry ], [ %work, %each ]",
        f"  %offset = mul nuw i64 %k, {width}",
        "  %row = getelementptr inbounds i64, ptr %table, i64 %offset",
        *sizes_only,
        f"  %extent = call i64 @{name}.extent({given})",
        f"  %cost = call i64 @{name}.work({given})",
        "  %total = add i64 %extents, %extent",
        "  %work = add i64 %works, %cost",
        "  %next = add nuw i64 %k, 1",
        "  %more = icmp slt i64 %next, %count",
        "  br i1 %more, label %each, label %choose",
        "choose:",
        f"  %enough = icmp sge i64 %work, {grain}",
        f"  %large = and i1 %enough, {team}",
        "  br i1 %large, label %team, label %alone",
        "alone:",
        f"  call void @{name}.share(ptr %arguments, i64 0, i64 %total)",
        "  br label %done",
        "team:",
        "  store ptr %arguments, ptr %data, align 8",
        "  %total.at = getelementptr inbounds i64, ptr %data, i64 1",
        "  store i64 %total, ptr %total.at, align 8",
        f"  call void @GOMP_parallel(ptr @{name}.member, ptr %data, i32 0, i32 0)",
        "  br label %done",
        "done:",
        "  ret void",
        "}",
    ])  # fmt: skip


DECLARATIONS = {
    "omp_get_thread_num": "declare i32 @omp_get_thread_num() nounwind",
    "omp_get_num_threads": "declare i32 @omp_get_num_threads() nounwind",
    "GOMP_parallel": "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
    "llvm.smax.i64": "declare i64 @llvm.smax.i64(i64, i64)",
    "llvm.smin.i64": "declare i64 @llvm.smin.i64(i64, i64)",
}
