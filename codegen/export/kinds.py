"""What is checked of one tensor before its sizes are known, and of the sizes, in LLVM IR.

Each function returns zero, or a code with a sentence in ``%text``. ``%which`` is "input" or "result", ``%k`` the number
among those.
"""

from __future__ import annotations

from .codes import CODES, DEVICE, SAY
from .constants import Constants


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
    t = constants.text
    named = "ptr %f.name, ptr %name, i64 %dim, i64 %number, ptr %input.name, i64 %value"
    return f"""
; Read each size where the function has it, and check that it is in its range.
define internal i32 @read_sizes(ptr %text, ptr %f, ptr %in, ptr %sizes) {{
entry:
  %f.name = load ptr, ptr %f
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 1
  %specs = load ptr, ptr %specs.at
  %rows.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 5
  %rows = load ptr, ptr %rows.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 6
  %count = load i64, ptr %count.at
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %next ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %one, label %done
one:
  %row = getelementptr inbounds %Size, ptr %rows, i64 %k
  %name = load ptr, ptr %row
  %number.at = getelementptr inbounds %Size, ptr %row, i32 0, i32 1
  %number = load i64, ptr %number.at
  %dim.at = getelementptr inbounds %Size, ptr %row, i32 0, i32 2
  %dim = load i64, ptr %dim.at
  %shape.at = getelementptr inbounds %Tensor, ptr %in, i64 %number, i32 7
  %shape = load ptr, ptr %shape.at
  %value.at = getelementptr inbounds i64, ptr %shape, i64 %dim
  %value = load i64, ptr %value.at
  %to = getelementptr inbounds i64, ptr %sizes, i64 %k
  store i64 %value, ptr %to
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %number
  %input.name = load ptr, ptr %spec
  %low.at = getelementptr inbounds %Size, ptr %row, i32 0, i32 3
  %low = load i64, ptr %low.at
  %high.at = getelementptr inbounds %Size, ptr %row, i32 0, i32 4
  %high = load i64, ptr %high.at
  %less = icmp slt i64 %value, %low
  br i1 %less, label %too.small, label %upper
too.small:
  %a = {SAY} {t("%s: %s, dimension %lld of input %lld (%s), is %lld; it has to be at least %lld")}, {named}, i64 %low)
  ret i32 {CODES["size"]}
upper:
  %above = icmp sgt i64 %value, %high
  br i1 %above, label %too.large, label %next
too.large:
  %b = {SAY} {t("%s: %s, dimension %lld of input %lld (%s), is %lld; it has to be at most %lld")}, {named}, i64 %high)
  ret i32 {CODES["size"]}
next:
  %k.next = add i64 %k, 1
  br label %each
done:
  ret i32 0
}}

; Compute the values of a function from its sizes, and check its guards.
define internal i32 @compute_values(ptr %text, ptr %f, ptr %sizes, ptr %values) {{
entry:
  %f.name = load ptr, ptr %f
  %fixed.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 7
  %fixed = load ptr, ptr %fixed.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 8
  %count = load i64, ptr %count.at
  %bytes = shl i64 %count, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %values, ptr %fixed, i64 %bytes, i1 false)
  %compute.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 11
  %compute = load ptr, ptr %compute.at
  %wrong = call i1 %compute(ptr %sizes, ptr %values)
  br i1 %wrong, label %beyond, label %guards
beyond:
  %a = {SAY} {t("%s: the sizes of its inputs give sizes that do not fit into 64 bits, or a division by zero")},
      ptr %f.name)
  ret i32 {CODES["size"]}
guards:
  %rules.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 9
  %rules = load ptr, ptr %rules.at
  %some.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 10
  %some = load i64, ptr %some.at
  %first = sub i64 %count, %some
  br label %each
each:
  %k = phi i64 [ 0, %guards ], [ %k.next, %one ]
  %more = icmp ult i64 %k, %some
  br i1 %more, label %one, label %done
one:
  %place = add i64 %first, %k
  %held.at = getelementptr inbounds i64, ptr %values, i64 %place
  %held = load i64, ptr %held.at
  %k.next = add i64 %k, 1
  %holds = icmp ne i64 %held, 0
  br i1 %holds, label %each, label %broken
broken:
  %rule.at = getelementptr inbounds ptr, ptr %rules, i64 %k
  %rule = load ptr, ptr %rule.at
  %b = {SAY} {t("%s: %s")}, ptr %f.name, ptr %rule)
  ret i32 {CODES["size"]}
done:
  ret i32 0
}}
"""
