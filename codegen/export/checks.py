"""What is checked of the tensors of a call, in LLVM IR. Nothing runs before all of it holds.

Each function returns zero, or one of the codes of ``CODES`` with a sentence in ``%text``. ``%which`` is "input" or
"result", ``%k`` the number among those.
"""

from __future__ import annotations

from .constants import Constants

# What functions of a library return.
CODES = {
    "ok": 0, "argument": 1, "tensor": 2, "size": 3, "index": 4, "file": 5, "processor": 6, "memory": 7,
}  # fmt: skip
MESSAGE_BYTES = 1024
_SAY = f"call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 {MESSAGE_BYTES}, ptr"


def checks_text(constants: Constants, types: int) -> str:
    """The functions that check one tensor, and those that check all of a call."""
    return _kinds(constants, types) + _sizes(constants) + _layouts(constants) + _data(constants) + _ALL


def _kinds(constants: Constants, types: int) -> str:
    t = constants.text
    tensor = "ptr %f.name, ptr %which, i64 %k, ptr %name"
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
  %a = {_SAY} {t("%s: %s %lld (%s) has %d dimensions; it has to have %d")}, {tensor}, i32 %given, i32 %rank)
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
  %b = {_SAY} {t("%s: %s %lld (%s) is of %s; it has to be of %s")}, {tensor}, ptr %here.name, ptr %type.name)
  ret i32 {CODES["tensor"]}
device:
  %kind.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 1
  %kind = load i32, ptr %kind.at
  %host = icmp eq i32 %kind, 1
  %pinned = icmp eq i32 %kind, 3
  %here.too = or i1 %host, %pinned
  br i1 %here.too, label %extents, label %wrong.device
wrong.device:
  %c = {_SAY} {
        t("%s: %s %lld (%s) is on a device of DLPack's kind %d; it has to be in the memory of the host (kind 1)")
    }, {tensor}, i32 %kind)
  ret i32 {CODES["tensor"]}
extents:
  %scalar = icmp eq i32 %rank, 0
  br i1 %scalar, label %fine, label %has.shape
has.shape:
  %shape.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 7
  %shape = load ptr, ptr %shape.at
  %none = icmp eq ptr %shape, null
  br i1 %none, label %no.shape, label %each
no.shape:
  %d = {_SAY} {t("%s: %s %lld (%s) has dimensions, and its shape is a null pointer")}, {tensor})
  ret i32 {CODES["tensor"]}
each:
  %i = phi i32 [ 0, %has.shape ], [ %i.next, %next ]
  %extent.at = getelementptr inbounds i64, ptr %shape, i32 %i
  %extent = load i64, ptr %extent.at
  %negative = icmp slt i64 %extent, 0
  br i1 %negative, label %below, label %next
below:
  %e = {_SAY} {t("%s: dimension %d of %s %lld (%s) is %lld, less than zero")}, ptr %f.name, i32 %i, ptr %which, i64 %k,
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


def _sizes(constants: Constants) -> str:
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
  %a = {_SAY} {t("%s: %s, dimension %lld of input %lld (%s), is %lld; it has to be at least %lld")}, {named}, i64 %low)
  ret i32 {CODES["size"]}
upper:
  %above = icmp sgt i64 %value, %high
  br i1 %above, label %too.large, label %next
too.large:
  %b = {_SAY} {t("%s: %s, dimension %lld of input %lld (%s), is %lld; it has to be at most %lld")}, {named}, i64 %high)
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
  %a = {_SAY} {t("%s: the sizes of its inputs give sizes that do not fit into 64 bits, or a division by zero")},
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
  %b = {_SAY} {t("%s: %s")}, ptr %f.name, ptr %rule)
  ret i32 {CODES["size"]}
done:
  ret i32 0
}}
"""


def _layouts(constants: Constants) -> str:
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
  %a = {_SAY} {t("%s: dimension %lld of %s %lld (%s) is %lld; it has to be %lld")}, {where}, i64 %given, i64 %wanted)
  ret i32 {CODES["size"]}
formula:
  %b = {_SAY} {t("%s: dimension %lld of %s %lld (%s) is %lld; it has to be %lld (%s)")}, {where}, i64 %given,
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
  %c = {_SAY} {t("%s: the stride of dimension %lld of %s %lld (%s) is %lld elements; it has to be %lld")}, ptr %f.name,
      i64 %j, ptr %which, i64 %k, ptr %name, i64 %has, i64 %needs)
  ret i32 {CODES["tensor"]}
fine:
  ret i32 0
}}
"""


def _data(constants: Constants) -> str:
    t = constants.text
    return f"""
; Bytes from the first element of a tensor to the end of its last; -1 where that has more than 63 bits.
define internal i64 @extent_of(ptr %spec, ptr %values) {{
entry:
  %rank.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 1
  %rank32 = load i32, ptr %rank.at
  %rank = zext i32 %rank32 to i64
  %bytes.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 3
  %bytes = load i64, ptr %bytes.at
  %first.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 4
  %first = load i64, ptr %first.at
  %extents = getelementptr inbounds i64, ptr %values, i64 %first
  %strides = getelementptr inbounds i64, ptr %extents, i64 %rank
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %add ]
  %last = phi i64 [ 0, %entry ], [ %last.next, %add ]
  %over = phi i1 [ false, %entry ], [ %over.next, %add ]
  %more = icmp ult i64 %i, %rank
  br i1 %more, label %one, label %all
one:
  %count.at = getelementptr inbounds i64, ptr %extents, i64 %i
  %count = load i64, ptr %count.at
  %none = icmp eq i64 %count, 0
  br i1 %none, label %empty, label %add
add:
  %stride.at = getelementptr inbounds i64, ptr %strides, i64 %i
  %stride = load i64, ptr %stride.at
  %most = sub i64 %count, 1
  %product = call {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64 %most, i64 %stride)
  %reach = extractvalue {{ i64, i1 }} %product, 0
  %over.a = extractvalue {{ i64, i1 }} %product, 1
  %sum = call {{ i64, i1 }} @llvm.sadd.with.overflow.i64(i64 %last, i64 %reach)
  %last.next = extractvalue {{ i64, i1 }} %sum, 0
  %over.b = extractvalue {{ i64, i1 }} %sum, 1
  %over.ab = or i1 %over.a, %over.b
  %over.next = or i1 %over, %over.ab
  %i.next = add i64 %i, 1
  br label %each
empty:
  ret i64 0
all:
  %count.all = call {{ i64, i1 }} @llvm.sadd.with.overflow.i64(i64 %last, i64 1)
  %elements = extractvalue {{ i64, i1 }} %count.all, 0
  %over.c = extractvalue {{ i64, i1 }} %count.all, 1
  %whole = call {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64 %elements, i64 %bytes)
  %extent = extractvalue {{ i64, i1 }} %whole, 0
  %over.d = extractvalue {{ i64, i1 }} %whole, 1
  %over.cd = or i1 %over.c, %over.d
  %over.all = or i1 %over, %over.cd
  %result = select i1 %over.all, i64 -1, i64 %extent
  ret i64 %result
}}

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
  %a = {_SAY} {t("%s: %s %lld (%s) would have more bytes than there are addresses")}, ptr %f.name, ptr %which, i64 %k,
      ptr %name)
  ret i32 {CODES["size"]}
some:
  %none = icmp eq ptr %data, null
  br i1 %none, label %missing, label %alignment
missing:
  %b = {_SAY} {t("%s: %s %lld (%s) has elements, and its data are a null pointer")}, ptr %f.name, ptr %which, i64 %k,
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
  %c = {_SAY} {t("%s: the data of %s %lld (%s) begin at %p, which is no multiple of %lld")}, ptr %f.name, ptr %which,
      i64 %k, ptr %name, ptr %start, i64 %most)
  ret i32 {CODES["tensor"]}
fine:
  ret i32 0
}}

; That result "k" shares no memory with "count" inputs or results, whose addresses and ends are told.
define internal i32 @check_apart(ptr %text, ptr %f, i64 %k, ptr %spec, ptr %start, ptr %stop, ptr %which, i64 %count,
                                 ptr %specs, ptr %addresses, ptr %ends) {{
entry:
  %f.name = load ptr, ptr %f
  %name = load ptr, ptr %spec
  %empty = icmp eq ptr %start, %stop
  br i1 %empty, label %done, label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %one, label %done
one:
  %address.at = getelementptr inbounds ptr, ptr %addresses, i64 %i
  %address = load ptr, ptr %address.at
  %end.at = getelementptr inbounds ptr, ptr %ends, i64 %i
  %end = load ptr, ptr %end.at
  %before = icmp ult ptr %start, %end
  %behind = icmp ult ptr %address, %stop
  %both = and i1 %before, %behind
  %some = icmp ne ptr %address, %end
  %touch = and i1 %both, %some
  br i1 %touch, label %shared, label %next
next:
  %i.next = add i64 %i, 1
  br label %each
shared:
  %other.spec = getelementptr inbounds %Spec, ptr %specs, i64 %i
  %other = load ptr, ptr %other.spec
  %a = {_SAY} {t("%s: result %lld (%s) shares memory with %s %lld (%s)")}, ptr %f.name, i64 %k, ptr %name, ptr %which,
      i64 %i, ptr %other)
  ret i32 {CODES["tensor"]}
done:
  ret i32 0
}}
"""


_ALL = """
; Kinds, sizes, values, guards and layouts of the inputs: all that the shapes of results need.
define internal i32 @check_inputs(ptr %text, ptr %f, ptr %in, ptr %values, ptr %sizes) {
entry:
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 1
  %specs = load ptr, ptr %specs.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %count = load i64, ptr %count.at
  br label %kinds
kinds:
  %k = phi i64 [ 0, %entry ], [ %k.next, %kind.fits ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %kind, label %read
kind:
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %k
  %tensor = getelementptr inbounds %Tensor, ptr %in, i64 %k
  %a = call i32 @check_kind(ptr %text, ptr %f, ptr @word_input, i64 %k, ptr %spec, ptr %tensor)
  %k.next = add i64 %k, 1
  %a.fine = icmp eq i32 %a, 0
  br i1 %a.fine, label %kind.fits, label %fail
kind.fits:
  br label %kinds
read:
  %b = call i32 @read_sizes(ptr %text, ptr %f, ptr %in, ptr %sizes)
  %b.fine = icmp eq i32 %b, 0
  br i1 %b.fine, label %compute, label %fail
compute:
  %c = call i32 @compute_values(ptr %text, ptr %f, ptr %sizes, ptr %values)
  %c.fine = icmp eq i32 %c, 0
  br i1 %c.fine, label %layouts, label %fail
layouts:
  %i = phi i64 [ 0, %compute ], [ %i.next, %layout.fits ]
  %i.more = icmp ult i64 %i, %count
  br i1 %i.more, label %layout, label %done
layout:
  %i.spec = getelementptr inbounds %Spec, ptr %specs, i64 %i
  %i.tensor = getelementptr inbounds %Tensor, ptr %in, i64 %i
  %d = call i32 @check_layout(ptr %text, ptr %f, ptr @word_input, i64 %i, ptr %i.spec, ptr %i.tensor, ptr %values)
  %i.next = add i64 %i, 1
  %d.fine = icmp eq i32 %d, 0
  br i1 %d.fine, label %layout.fits, label %fail
layout.fits:
  br label %layouts
done:
  ret i32 0
fail:
  %code = phi i32 [ %a, %kind ], [ %b, %read ], [ %c, %compute ], [ %d, %layout ]
  ret i32 %code
}

; Data of the inputs, and kinds, layouts and data of the results, which share memory with nothing.
define internal i32 @check_memory(ptr %text, ptr %f, ptr %in, ptr %out, ptr %values, ptr %inputs, ptr %results,
                                  ptr %input.ends, ptr %result.ends) {
entry:
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 1
  %specs = load ptr, ptr %specs.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %count = load i64, ptr %count.at
  %out.specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 3
  %out.specs = load ptr, ptr %out.specs.at
  %out.count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %out.count = load i64, ptr %out.count.at
  br label %data
data:
  %k = phi i64 [ 0, %entry ], [ %k.next, %data.fits ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %one, label %outputs
one:
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %k
  %tensor = getelementptr inbounds %Tensor, ptr %in, i64 %k
  %address = getelementptr inbounds ptr, ptr %inputs, i64 %k
  %end = getelementptr inbounds ptr, ptr %input.ends, i64 %k
  %a = call i32 @check_data(ptr %text, ptr %f, ptr @word_input, i64 %k, ptr %spec, ptr %tensor, ptr %values,
                            ptr %address, ptr %end)
  %k.next = add i64 %k, 1
  %a.fine = icmp eq i32 %a, 0
  br i1 %a.fine, label %data.fits, label %fail
data.fits:
  br label %data
outputs:
  %i = phi i64 [ 0, %data ], [ %i.next, %apart ]
  %i.more = icmp ult i64 %i, %out.count
  br i1 %i.more, label %kind, label %done
kind:
  %o.spec = getelementptr inbounds %Spec, ptr %out.specs, i64 %i
  %o.tensor = getelementptr inbounds %Tensor, ptr %out, i64 %i
  %b = call i32 @check_kind(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor)
  %b.fine = icmp eq i32 %b, 0
  br i1 %b.fine, label %layout, label %fail
layout:
  %c = call i32 @check_layout(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor, ptr %values)
  %c.fine = icmp eq i32 %c, 0
  br i1 %c.fine, label %memory, label %fail
memory:
  %o.address = getelementptr inbounds ptr, ptr %results, i64 %i
  %o.end = getelementptr inbounds ptr, ptr %result.ends, i64 %i
  %d = call i32 @check_data(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor, ptr %values,
                            ptr %o.address, ptr %o.end)
  %d.fine = icmp eq i32 %d, 0
  br i1 %d.fine, label %inputs.apart, label %fail
inputs.apart:
  %start = load ptr, ptr %o.address
  %stop = load ptr, ptr %o.end
  %e = call i32 @check_apart(ptr %text, ptr %f, i64 %i, ptr %o.spec, ptr %start, ptr %stop, ptr @word_input,
                             i64 %count, ptr %specs, ptr %inputs, ptr %input.ends)
  %e.fine = icmp eq i32 %e, 0
  br i1 %e.fine, label %results.apart, label %fail
results.apart:
  %g = call i32 @check_apart(ptr %text, ptr %f, i64 %i, ptr %o.spec, ptr %start, ptr %stop, ptr @word_result,
                             i64 %i, ptr %out.specs, ptr %results, ptr %result.ends)
  %i.next = add i64 %i, 1
  %g.fine = icmp eq i32 %g, 0
  br i1 %g.fine, label %apart, label %fail
apart:
  br label %outputs
done:
  ret i32 0
fail:
  %code = phi i32 [ %a, %one ], [ %b, %kind ], [ %c, %layout ], [ %d, %memory ], [ %e, %inputs.apart ],
                  [ %g, %results.apart ]
  ret i32 %code
}
"""
