"""What is checked of one tensor before its sizes are known, and of the sizes, in LLVM IR.

Each function returns zero, or a code with a sentence in ``%text``. ``%which`` is "input" or "result", ``%k`` the number
among those.
"""

from __future__ import annotations

from ..codes import CODES, DEVICE, SAY
from ..constants import Constants
from ..routine import Routine


def kinds_text(constants: Constants, types: int, gpu: bool) -> str:
    """``@check_kind``, with so many rows of ``@types``, of tensors in the memory of the host or of a GPU."""
    t = constants.text
    device = _gpu_text(constants) if gpu else _host_text(constants)
    tensor = _TENSOR
    return f"""
; The name of a type by DLPack's numbers.
define internal ptr @type_name(i32 %packed) {{
entry:
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %next ]
  %row = getelementptr inbounds {{ i32, ptr }}, ptr @types, i64 %k
  %here = load i32, ptr %row
  %same = icmp eq i32 %here, %packed
  br i1 %same, label %found, label %next
next:
  %k.next = add i64 %k, 1
  %more = icmp ult i64 %k.next, {types}
  br i1 %more, label %each, label %unknown
found:
  %name.at = getelementptr inbounds {{ i32, ptr }}, ptr %row, i32 0, i32 1
  %name = load ptr, ptr %name.at
  ret ptr %name
unknown:
  ret ptr {t("a type that this library does not know")}
}}

; Rank, type and device of a tensor, and that no dimension is below zero.
define internal i32 @check_kind(ptr %text, ptr %f, ptr %which, i64 %k, ptr %spec, ptr %tensor) {{
entry:
  %f.name = load ptr, ptr %f
  %name = load ptr, ptr %spec
  %rank.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 1
  %rank = load i32, ptr %rank.at
  %given.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 3
  %given = load i32, ptr %given.at
  %rank.fits = icmp eq i32 %given, %rank
  br i1 %rank.fits, label %type, label %wrong.rank
wrong.rank:
  %a = {SAY} {t("%s: %s %lld (%s) has %d dimensions; it has to have %d")}, {tensor}, i32 %given, i32 %rank)
  ret i32 {CODES["tensor"]}
type:
  %packed.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 2
  %packed = load i32, ptr %packed.at
  %here.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 4
  %here = load i32, ptr %here.at
  %type.fits = icmp eq i32 %here, %packed
  br i1 %type.fits, label %device, label %wrong.type
wrong.type:
  %here.name = call ptr @type_name(i32 %here)
  %type.name.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 6
  %type.name = load ptr, ptr %type.name.at
  %b = {SAY} {t("%s: %s %lld (%s) is of %s; it has to be of %s")}, {tensor}, ptr %here.name, ptr %type.name)
  ret i32 {CODES["tensor"]}
device:
  %kind.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 1
  %kind = load i32, ptr %kind.at
  {device}
extents:
  %scalar = icmp eq i32 %rank, 0
  br i1 %scalar, label %fine, label %has.shape
has.shape:
  %shape.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 7
  %shape = load ptr, ptr %shape.at
  %none = icmp eq ptr %shape, null
  br i1 %none, label %no.shape, label %each
no.shape:
  %d = {SAY} {t("%s: %s %lld (%s) has dimensions, and its shape is a null pointer")}, {tensor})
  ret i32 {CODES["tensor"]}
each:
  %i = phi i32 [ 0, %has.shape ], [ %i.next, %next ]
  %extent.at = getelementptr inbounds i64, ptr %shape, i32 %i
  %extent = load i64, ptr %extent.at
  %negative = icmp slt i64 %extent, 0
  br i1 %negative, label %below, label %next
below:
  %e = {SAY} {t("%s: dimension %d of %s %lld (%s) is %lld, less than zero")}, ptr %f.name, i32 %i, ptr %which, i64 %k,
      ptr %name, i64 %extent)
  ret i32 {CODES["size"]}
next:
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, %rank
  br i1 %more, label %each, label %fine
fine:
  ret i32 0
}}
"""


_TENSOR = "ptr %f.name, ptr %which, i64 %k, ptr %name"


def _host_text(constants: Constants) -> str:
    t = constants.text
    return f"""%host = icmp eq i32 %kind, 1
  %pinned = icmp eq i32 %kind, 3
  %here.too = or i1 %host, %pinned
  br i1 %here.too, label %extents, label %wrong.device
wrong.device:
  %c = {SAY} {
        t("%s: %s %lld (%s) is on a device of DLPack's kind %d; it has to be in the memory of the host (kind 1)")
    }, {_TENSOR}, i32 %kind)
  ret i32 {CODES["tensor"]}"""


def _gpu_text(constants: Constants) -> str:
    """Memory that the driver moves about (kind 13) is on any."""
    t = constants.text
    told = t("%s: %s %lld (%s) is on device %d of DLPack's kind %d; it has to be on GPU %d (kind 2), as the model is")
    return f"""%id.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 2
  %id = load i32, ptr %id.at
  %number.at = call ptr @llvm.threadlocal.address.p0(ptr @device_number)
  %number = load i32, ptr %number.at
  %same = icmp eq i32 %id, %number
  %plain = icmp eq i32 %kind, {DEVICE[True]}
  %there = and i1 %same, %plain
  %managed = icmp eq i32 %kind, 13
  %fits = or i1 %there, %managed
  br i1 %fits, label %extents, label %wrong.device
wrong.device:
  %c = {SAY} {told}, {_TENSOR}, i32 %id, i32 %kind, i32 %number)
  ret i32 {CODES["tensor"]}"""


def sizes_text(constants: Constants) -> str:
    """``@read_sizes`` and ``@compute_values``."""
    return _read_sizes(constants) + _compute_values(constants)


def _read_sizes(constants: Constants) -> str:
    t, r = constants.text, Routine()
    function, specs = r.value("load ptr, ptr %f"), r.load("ptr", "%Function", "%f", 1)
    rows, count = r.load("ptr", "%Function", "%f", 5), r.load("i64", "%Function", "%f", 6)
    with r.each(count, "size") as k:
        row = r.item("%Size", rows, k)
        name = r.load("ptr", "%Size", row, 0)
        number, dim, low, high = (r.load("i64", "%Size", row, f) for f in (1, 2, 3, 4))
        shape = r.load("ptr", "%Tensor", r.item("%Tensor", "%in", number), 7)
        value = r.load("i64", "i64", shape, dim)
        r.store("i64", value, "i64", "%sizes", k)
        given = r.load("ptr", "%Spec", r.item("%Spec", specs, number), 0)
        named = f"ptr {function}, ptr {name}, i64 {dim}, i64 {number}, ptr {given}, i64 {value}"
        for how, bound, word in (("slt", low, "least"), ("sgt", high, "most")):
            told = t(f"%s: %s, dimension %lld of input %lld (%s), is %lld; it has to be at {word} %lld")
            with r.when(r.value(f"icmp {how} i64 {value}, {bound}"), word):
                r.value(f"{SAY} {told}, {named}, i64 {bound})")
                r.line(f"ret i32 {CODES['size']}")
    r.line("ret i32 0")
    return r.text(
        "\n; Read each size where the function has it, and check that it is in its range.\n"
        "define internal i32 @read_sizes(ptr %text, ptr %f, ptr %in, ptr %sizes)"
    )


def _compute_values(constants: Constants) -> str:
    t, r = constants.text, Routine()
    function = r.value("load ptr, ptr %f")
    fixed, count = r.load("ptr", "%Function", "%f", 7), r.load("i64", "%Function", "%f", 8)
    nbytes = r.value(f"shl i64 {count}, 3")
    r.line(f"call void @llvm.memcpy.p0.p0.i64(ptr %values, ptr {fixed}, i64 {nbytes}, i1 false)")
    compute = r.load("ptr", "%Function", "%f", 11)
    with r.when(r.value(f"call i1 {compute}(ptr %sizes, ptr %values)"), "beyond"):
        told = t("%s: the sizes of its inputs give sizes that do not fit into 64 bits, or a division by zero")
        r.value(f"{SAY} {told}, ptr {function})")
        r.line(f"ret i32 {CODES['size']}")
    rules, some = r.load("ptr", "%Function", "%f", 9), r.load("i64", "%Function", "%f", 10)
    first = r.value(f"sub i64 {count}, {some}")
    with r.each(some, "guard") as k:
        held = r.load("i64", "i64", "%values", r.value(f"add i64 {first}, {k}"))
        with r.when(r.value(f"icmp eq i64 {held}, 0"), "broken"):
            r.value(f"{SAY} {t('%s: %s')}, ptr {function}, ptr {r.load('ptr', 'ptr', rules, k)})")
            r.line(f"ret i32 {CODES['size']}")
    r.line("ret i32 0")
    return r.text(
        "\n; Compute the values of a function from its sizes, and check its guards.\n"
        "define internal i32 @compute_values(ptr %text, ptr %f, ptr %sizes, ptr %values)"
    )
