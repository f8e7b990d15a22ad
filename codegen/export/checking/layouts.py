"""What is checked of one tensor once the sizes are known, in LLVM IR: shape, strides, and where its data are.

Functions return and name things as those of ``kinds.py`` do.
"""

from __future__ import annotations

from ..codes import CODES, SAY
from ..constants import Constants
from ..routine import Routine


def layouts_text(constants: Constants) -> str:
    """``@check_layout``: shape and strides of one tensor."""
    t = constants.text
    where = "ptr %f.name, i64 %i, ptr %which, i64 %k, ptr %name"
    return f"""
; Shape and strides of a tensor against the values of the function. Strides of dimensions with one element, and of
; tensors with none, mean nothing. A null pointer in place of strides stands for dense rows.
define internal i32 @check_layout(ptr %text, ptr %f, ptr %which, i64 %k, ptr %spec, ptr %tensor, ptr %values) {{
entry:
  %f.name = load ptr, ptr %f
  %name = load ptr, ptr %spec
  %rank.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 1
  %rank32 = load i32, ptr %rank.at
  %rank = zext i32 %rank32 to i64
  %first.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 4
  %first = load i64, ptr %first.at
  %texts.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 5
  %texts = load ptr, ptr %texts.at
  %extents = getelementptr inbounds i64, ptr %values, i64 %first
  %wanted.strides = getelementptr inbounds i64, ptr %extents, i64 %rank
  %shape.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 7
  %shape = load ptr, ptr %shape.at
  %strides.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 8
  %strides = load ptr, ptr %strides.at
  %dense = icmp eq ptr %strides, null
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %same ]
  %empty = phi i1 [ false, %entry ], [ %empty.next, %same ]
  %more = icmp ult i64 %i, %rank
  br i1 %more, label %extent, label %all
extent:
  %wanted.at = getelementptr inbounds i64, ptr %extents, i64 %i
  %wanted = load i64, ptr %wanted.at
  %given.at = getelementptr inbounds i64, ptr %shape, i64 %i
  %given = load i64, ptr %given.at
  %zero = icmp eq i64 %given, 0
  %empty.next = or i1 %empty, %zero
  %fits = icmp eq i64 %given, %wanted
  br i1 %fits, label %same, label %wrong
same:
  %i.next = add i64 %i, 1
  br label %each
wrong:
  %said.at = getelementptr inbounds ptr, ptr %texts, i64 %i
  %said = load ptr, ptr %said.at
  %number = icmp eq ptr %said, null
  br i1 %number, label %plain, label %formula
plain:
  %a = {SAY} {t("%s: dimension %lld of %s %lld (%s) is %lld; it has to be %lld")}, {where}, i64 %given, i64 %wanted)
  ret i32 {CODES["size"]}
formula:
  %b = {SAY} {t("%s: dimension %lld of %s %lld (%s) is %lld; it has to be %lld (%s)")}, {where}, i64 %given,
      i64 %wanted, ptr %said)
  ret i32 {CODES["size"]}
all:
  br i1 %empty, label %fine, label %from.last
from.last:
  br label %back
back:
  %left = phi i64 [ %rank, %from.last ], [ %j, %right ]
  %dense.stride = phi i64 [ 1, %from.last ], [ %dense.next, %right ]
  %some = icmp ne i64 %left, 0
  br i1 %some, label %stride, label %fine
stride:
  %j = sub i64 %left, 1
  %count.at = getelementptr inbounds i64, ptr %extents, i64 %j
  %count = load i64, ptr %count.at
  %dense.next = mul i64 %dense.stride, %count
  br i1 %dense, label %chosen, label %told
told:
  %own.at = getelementptr inbounds i64, ptr %strides, i64 %j
  %own = load i64, ptr %own.at
  br label %chosen
chosen:
  %has = phi i64 [ %dense.stride, %stride ], [ %own, %told ]
  %needs.at = getelementptr inbounds i64, ptr %wanted.strides, i64 %j
  %needs = load i64, ptr %needs.at
  %alike = icmp eq i64 %has, %needs
  %single = icmp eq i64 %count, 1
  %right.stride = or i1 %alike, %single
  br i1 %right.stride, label %right, label %wrong.stride
right:
  br label %back
wrong.stride:
  %c = {SAY} {t("%s: the stride of dimension %lld of %s %lld (%s) is %lld elements; it has to be %lld")}, ptr %f.name,
      i64 %j, ptr %which, i64 %k, ptr %name, i64 %has, i64 %needs)
  ret i32 {CODES["tensor"]}
fine:
  ret i32 0
}}
"""


def data_text(constants: Constants) -> str:
    """``@check_data`` and ``@check_apart``: where one tensor lies."""
    t = constants.text
    checked = f"""
; The data of a tensor: where they are goes to "address", where they end to "end".
define internal i32 @check_data(ptr %text, ptr %f, ptr %which, i64 %k, ptr %spec, ptr %tensor, ptr %values,
                                ptr %address, ptr %end) {{
  %f.name = load ptr, ptr %f
  %name = load ptr, ptr %spec
  %data = load ptr, ptr %tensor
  %offset.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 9
  %offset = load i64, ptr %offset.at
  %start = getelementptr i8, ptr %data, i64 %offset
  store ptr %start, ptr %address
  %extent = call i64 @extent_of(ptr %spec, ptr %values)
  %stop = getelementptr i8, ptr %start, i64 %extent
  store ptr %stop, ptr %end
  %empty = icmp eq i64 %extent, 0
  br i1 %empty, label %fine, label %size
size:
  %large = icmp slt i64 %extent, 0
  br i1 %large, label %too.large, label %some
too.large:
  %a = {SAY} {t("%s: %s %lld (%s) would have more bytes than there are addresses")}, ptr %f.name, ptr %which, i64 %k,
      ptr %name)
  ret i32 {CODES["size"]}
some:
  %none = icmp eq ptr %data, null
  br i1 %none, label %missing, label %alignment
missing:
  %b = {SAY} {t("%s: %s %lld (%s) has elements, and its data are a null pointer")}, ptr %f.name, ptr %which, i64 %k,
      ptr %name)
  ret i32 {CODES["tensor"]}
alignment:
  %bytes.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 3
  %bytes = load i64, ptr %bytes.at
  %most = call i64 @llvm.umin.i64(i64 %bytes, i64 8)
  %mask = sub i64 %most, 1
  %place = ptrtoint ptr %start to i64
  %rest = and i64 %place, %mask
  %right = icmp eq i64 %rest, 0
  br i1 %right, label %fine, label %odd
odd:
  %c = {SAY} {t("%s: the data of %s %lld (%s) begin at %p, which is no multiple of %lld")}, ptr %f.name, ptr %which,
      i64 %k, ptr %name, ptr %start, i64 %most)
  ret i32 {CODES["tensor"]}
fine:
  ret i32 0
}}
"""
    return _extent_of() + checked + _check_apart(constants)


def _extent_of() -> str:
    r = Routine()
    rank = r.value(f"zext i32 {r.load('i32', '%Spec', '%spec', 1)} to i64")
    nbytes, first = r.load("i64", "%Spec", "%spec", 3), r.load("i64", "%Spec", "%spec", 4)
    extents = r.item("i64", "%values", first)
    strides = r.item("i64", extents, rank)
    last, over = r.value("alloca i64"), r.value("alloca i1")
    r.line(f"store i64 0, ptr {last}")
    r.line(f"store i1 false, ptr {over}")

    def grown(step: str, by: str, to: str) -> str:
        both = r.value(f"call {{ i64, i1 }} @llvm.{step}.with.overflow.i64(i64 {by}, i64 {to})")
        wrong = r.value(f"extractvalue {{ i64, i1 }} {both}, 1")
        so_far = r.value(f"load i1, ptr {over}")
        r.line(f"store i1 {r.value(f'or i1 {so_far}, {wrong}')}, ptr {over}")
        return r.value(f"extractvalue {{ i64, i1 }} {both}, 0")

    with r.each(rank, "dim") as k:
        count, stride = r.load("i64", "i64", extents, k), r.load("i64", "i64", strides, k)
        with r.when(r.value(f"icmp eq i64 {count}, 0"), "empty"):
            r.line("ret i64 0")
        reach = grown("smul", r.value(f"sub i64 {count}, 1"), stride)
        r.line(f"store i64 {grown('sadd', r.value(f'load i64, ptr {last}'), reach)}, ptr {last}")
    elements = grown("sadd", r.value(f"load i64, ptr {last}"), "1")
    extent = grown("smul", elements, nbytes)
    wrong = r.value(f"load i1, ptr {over}")
    r.line(f"ret i64 {r.value(f'select i1 {wrong}, i64 -1, i64 {extent}')}")
    return r.text(
        "\n; Bytes from the first element of a tensor to the end of its last; -1 where that has more than 63 bits.\n"
        "define internal i64 @extent_of(ptr %spec, ptr %values)"
    )


def _check_apart(constants: Constants) -> str:
    t, r = constants.text, Routine()
    function, name = r.value("load ptr, ptr %f"), r.value("load ptr, ptr %spec")
    with r.when(r.value("icmp eq ptr %start, %stop"), "empty"):
        r.line("ret i32 0")
    with r.each("%count", "other") as k:
        address, end = r.load("ptr", "ptr", "%addresses", k), r.load("ptr", "ptr", "%ends", k)
        before, behind = r.value(f"icmp ult ptr %start, {end}"), r.value(f"icmp ult ptr {address}, %stop")
        some = r.value(f"icmp ne ptr {address}, {end}")
        touch = r.value(f"and i1 {r.value(f'and i1 {before}, {behind}')}, {some}")
        with r.when(touch, "shared"):
            other = r.load("ptr", "%Spec", r.item("%Spec", "%specs", k), 0)
            told = t("%s: result %lld (%s) shares memory with %s %lld (%s)")
            r.value(f"{SAY} {told}, ptr {function}, i64 %k, ptr {name}, ptr %which, i64 {k}, ptr {other})")
            r.line(f"ret i32 {CODES['tensor']}")
    r.line("ret i32 0")
    return r.text(
        '\n; That result "k" shares no memory with "count" inputs or results, whose addresses and ends are told.\n'
        "define internal i32 @check_apart(ptr %text, ptr %f, i64 %k, ptr %spec, ptr %start, ptr %stop, ptr %which,\n"
        "                                 i64 %count, ptr %specs, ptr %addresses, ptr %ends)"
    )
