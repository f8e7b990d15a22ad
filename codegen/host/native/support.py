"""What every native host program calls: functions of LLVM IR that are the same for all of them.

Those that take over arguments, make tensors and let go of them are here, those about objects of Python's in
``native/objects.py``.
"""

from __future__ import annotations

from ..memory.blocks import LEAST_BLOCK
from .launch import CONTEXTS, LAUNCH
from .objects import OBJECTS, OUTSIDE
from .table import DIES, ELEMENT_SHIFT, IS_SIZE, IS_TENSOR, OPAQUE, UNUSED, place


def support_text() -> str:
    """The module of ``SUPPORT_FUNCTIONS``."""
    lines = []
    for line in (_TENSORS + OUTSIDE + OBJECTS + CONTEXTS + LAUNCH).splitlines():
        at = line.find("!")
        if at < 0:
            lines.append(line)
            continue
        # "%x = !name" reads a word of the table.
        left, name = line[:at], line[at + 1 :].strip()
        variable = left.strip().split(" ")[0]
        indent = left[: len(left) - len(left.lstrip())]
        kind = "i64" if name == "offset" else "ptr"
        lines.append(f"{indent}{variable}.at = getelementptr inbounds i64, ptr %table, i64 {place(name)}")
        lines.append(f"{indent}{variable} = load {kind}, ptr {variable}.at")
    return "\n".join(lines) + "\n"


_TENSORS = f"""
; Whether the object is a tensor of one of the types whose every value is plain memory.
define internal i1 @plain(ptr %table, ptr %object) alwaysinline {{
  %type.at = getelementptr inbounds i8, ptr %object, i64 8
  %type = load ptr, ptr %type.at
  %tensor = !Tensor
  %parameter = !Parameter
  %a = icmp eq ptr %type, %tensor
  %b = icmp eq ptr %type, %parameter
  %ab = or i1 %a, %b
  ret i1 %ab
}}

define internal i1 @find(ptr %table, ptr %slot) alwaysinline {{
  %get = !aoti_torch_get_data_ptr
  %tensor = load ptr, ptr %slot
  %data = getelementptr inbounds i64, ptr %slot, i64 2
  %status = call i32 %get(ptr %tensor, ptr %data)
  %failed = icmp ne i32 %status, 0
  ret i1 %failed
}}

; The address of the data of a tensor, into its slot; true where it has none.
define i1 @mlc_find(ptr %table, ptr %slot) {{
  %failed = call i1 @find(ptr %table, ptr %slot)
  ret i1 %failed
}}

; Take over the arguments in a list: objects, tensors, addresses, integers. True where they are not what code is for;
; then the list is as it was and the frame holds nothing. The list is emptied; tensors that die in the program and that
; nobody else holds are the frame's own. Tensors have "least" bytes of memory, or no elements.
define i1 @mlc_enter(ptr %table, ptr %frame, ptr %list, i64 %count, ptr %kinds, ptr %least, i64 %objects,
                     i64 %values) {{
entry:
  %numel.at = alloca i64
  %bytes.at = alloca i64
  %start.at = alloca i64
  %size.of = !PyList_Size
  %item.of = !PyList_GetItem
  %inc = !Py_IncRef
  %dec = !Py_DecRef
  %integer = !PyLong_AsLongLong
  %occurred = !PyErr_Occurred
  %clear = !PyErr_Clear
  %cut = !PyList_SetSlice
  %new = !aoti_torch_new_tensor_handle
  %bytes.of = !aoti_torch_get_storage_size
  %start.of = !aoti_torch_get_storage_offset
  %offset = !offset
  %size = call i64 %size.of(ptr %list)
  %fits = icmp eq i64 %size, %count
  br i1 %fits, label %some, label %wrong
some:
  %none = icmp eq i64 %count, 0
  br i1 %none, label %good, label %loop
loop:
  %k = phi i64 [ 0, %some ], [ %next, %more ]
  %object = call ptr %item.of(ptr %list, i64 %k)
  %kind.at = getelementptr inbounds i8, ptr %kinds, i64 %k
  %kind = load i8, ptr %kind.at
  %is.tensor.bit = and i8 %kind, {IS_TENSOR}
  %is.tensor = icmp ne i8 %is.tensor.bit, 0
  br i1 %is.tensor, label %tensor, label %other
tensor:
  %plain = call i1 @plain(ptr %table, ptr %object)
  br i1 %plain, label %known, label %wrong
known:
  %inside = getelementptr inbounds i8, ptr %object, i64 %offset
  %word = mul i64 %k, 3
  %slot = getelementptr inbounds i64, ptr %frame, i64 %word
  store ptr %inside, ptr %slot
  %opaque.bit = and i8 %kind, {OPAQUE}
  %opaque = icmp ne i8 %opaque.bit, 0
  br i1 %opaque, label %more, label %open
open:
  %lost = call i1 @find(ptr %table, ptr %slot)
  br i1 %lost, label %wrong, label %there
there:
  %bytes.lost = call i32 %bytes.of(ptr %inside, ptr %bytes.at)
  %start.lost = call i32 %start.of(ptr %inside, ptr %start.at)
  %bytes = load i64, ptr %bytes.at
  %start = load i64, ptr %start.at
  %shift = lshr i8 %kind, {ELEMENT_SHIFT}
  %shift.wide = zext i8 %shift to i64
  %start.bytes = shl i64 %start, %shift.wide
  %rest = sub i64 %bytes, %start.bytes
  %least.at = getelementptr inbounds i64, ptr %least, i64 %k
  %wanted = load i64, ptr %least.at
  %short = icmp slt i64 %rest, %wanted
  br i1 %short, label %freed, label %more
freed:
  %numel.of = !aoti_torch_get_numel
  %unknown = call i32 %numel.of(ptr %inside, ptr %numel.at)
  %numel = load i64, ptr %numel.at
  %any = icmp ne i64 %numel, 0
  br i1 %any, label %wrong, label %more
other:
  %is.size.bit = and i8 %kind, {IS_SIZE}
  %is.size = icmp ne i8 %is.size.bit, 0
  br i1 %is.size, label %number, label %more
number:
  %value = call i64 %integer(ptr %object)
  %value.word = add i64 %values, %k
  %value.at = getelementptr inbounds i64, ptr %frame, i64 %value.word
  store i64 %value, ptr %value.at
  %suspect = icmp eq i64 %value, -1
  br i1 %suspect, label %check, label %more
check:
  %error = call ptr %occurred()
  %bad = icmp ne ptr %error, null
  br i1 %bad, label %forget, label %more
forget:
  call void %clear()
  br label %wrong
more:
  %next = add nuw i64 %k, 1
  %again = icmp ult i64 %next, %count
  br i1 %again, label %loop, label %hold
wrong:
  ret i1 true
hold:
  %h = phi i64 [ 0, %more ], [ %h.next, %held ]
  %h.kind.at = getelementptr inbounds i8, ptr %kinds, i64 %h
  %h.kind = load i8, ptr %h.kind.at
  %h.unused.bit = and i8 %h.kind, {UNUSED}
  %h.unused = icmp ne i8 %h.unused.bit, 0
  br i1 %h.unused, label %held, label %keep.it
keep.it:
  %h.object = call ptr %item.of(ptr %list, i64 %h)
  call void %inc(ptr %h.object)
  %h.word = add i64 %objects, %h
  %h.at = getelementptr inbounds i64, ptr %frame, i64 %h.word
  store ptr %h.object, ptr %h.at
  br label %held
held:
  %h.next = add nuw i64 %h, 1
  %h.again = icmp ult i64 %h.next, %count
  br i1 %h.again, label %hold, label %empty
empty:
  %ignored = call i32 %cut(ptr %list, i64 0, i64 %count, ptr null)
  br label %own
own:
  %o = phi i64 [ 0, %empty ], [ %o.next, %own.more ]
  %o.kind.at = getelementptr inbounds i8, ptr %kinds, i64 %o
  %o.kind = load i8, ptr %o.kind.at
  %o.dies.bit = and i8 %o.kind, {DIES}
  %o.dies = icmp ne i8 %o.dies.bit, 0
  br i1 %o.dies, label %dying, label %own.more
dying:
  %o.word = add i64 %objects, %o
  %o.at = getelementptr inbounds i64, ptr %frame, i64 %o.word
  %o.object = load ptr, ptr %o.at
  ; The low half of the count of references, which is the count in every version of Python.
  %references = load i32, ptr %o.object
  %alone = icmp eq i32 %references, 1
  br i1 %alone, label %take, label %own.more
take:
  %o.slot.word = mul i64 %o, 3
  %o.slot = getelementptr inbounds i64, ptr %frame, i64 %o.slot.word
  %o.tensor = load ptr, ptr %o.slot
  %o.owned = getelementptr inbounds i64, ptr %o.slot, i64 1
  %o.status = call i32 %new(ptr %o.tensor, ptr %o.owned)
  %o.failed = icmp ne i32 %o.status, 0
  br i1 %o.failed, label %keep, label %taken
keep:
  store ptr null, ptr %o.owned
  br label %own.more
taken:
  %o.handle = load ptr, ptr %o.owned
  store ptr %o.handle, ptr %o.slot
  store ptr null, ptr %o.at
  call void %dec(ptr %o.object)
  br label %own.more
own.more:
  %o.next = add nuw i64 %o, 1
  %o.again = icmp ult i64 %o.next, %count
  br i1 %o.again, label %own, label %good
good:
  ret i1 false
}}

; Let go of all that a frame holds.
define void @mlc_leave(ptr %table, ptr %frame, i64 %slots, i64 %objects) {{
entry:
  %delete = !aoti_torch_delete_tensor_object
  %dec = !Py_DecRef
  br label %slot
slot:
  %s = phi i64 [ 0, %entry ], [ %s.next, %slot.more ]
  %s.again = icmp ult i64 %s, %slots
  br i1 %s.again, label %slot.do, label %object
slot.do:
  %word = mul i64 %s, 3
  %word1 = add i64 %word, 1
  %at = getelementptr inbounds i64, ptr %frame, i64 %word1
  %owned = load ptr, ptr %at
  %s.none = icmp eq ptr %owned, null
  br i1 %s.none, label %slot.more, label %slot.free
slot.free:
  %status = call i32 %delete(ptr %owned)
  br label %slot.more
slot.more:
  %s.next = add nuw i64 %s, 1
  br label %slot
object:
  %o = phi i64 [ 0, %slot ], [ %o.next, %object.more ]
  %o.again = icmp ult i64 %o, %objects
  br i1 %o.again, label %object.do, label %done
object.do:
  %base = mul i64 %slots, 3
  %o.word = add i64 %base, %o
  %o.at = getelementptr inbounds i64, ptr %frame, i64 %o.word
  %held = load ptr, ptr %o.at
  %o.none = icmp eq ptr %held, null
  br i1 %o.none, label %object.more, label %object.free
object.free:
  call void %dec(ptr %held)
  br label %object.more
object.more:
  %o.next = add nuw i64 %o, 1
  br label %object
done:
  ret void
}}

; Let go of the tensor of a slot, where it is the frame's own.
define void @mlc_drop(ptr %table, ptr %slot) {{
entry:
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  %owned = load ptr, ptr %at
  %none = icmp eq ptr %owned, null
  br i1 %none, label %done, label %free
free:
  %delete = !aoti_torch_delete_tensor_object
  store ptr null, ptr %at
  %status = call i32 %delete(ptr %owned)
  br label %done
done:
  ret void
}}

define internal i1 @kept(ptr %table, ptr %slot, i32 %status) alwaysinline {{
entry:
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %bad, label %good
good:
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  %tensor = load ptr, ptr %at
  store ptr %tensor, ptr %slot
  %lost = call i1 @find(ptr %table, ptr %slot)
  ret i1 %lost
bad:
  %at.bad = getelementptr inbounds i64, ptr %slot, i64 1
  store ptr null, ptr %at.bad
  ret i1 true
}}

; A new tensor in a slot, not initialised; true where there is no memory, and where it has so many bytes that it is a
; block of the pool, which Python asks for.
define i1 @mlc_make(ptr %table, ptr %slot, i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %device,
                    i32 %index, i64 %bytes) {{
entry:
  %block = icmp sge i64 %bytes, {LEAST_BLOCK}
  br i1 %block, label %pooled, label %own
pooled:
  ret i1 true
own:
  %empty = !aoti_torch_empty_strided
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  %status = call i32 %empty(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %device, i32 %index, ptr %at)
  %failed = call i1 @kept(ptr %table, ptr %slot, i32 %status)
  ret i1 %failed
}}

; A tensor over the memory of another, in a slot; true where there is none such.
define i1 @mlc_view(ptr %table, ptr %slot, ptr %source, i64 %rank, ptr %sizes, ptr %strides, i64 %offset) {{
  %reinterpret = !aoti_torch__reinterpret_tensor
  %tensor = load ptr, ptr %source
  %result = alloca ptr
  %status = call i32 %reinterpret(ptr %tensor, i64 %rank, ptr %sizes, ptr %strides, i64 %offset, ptr %result)
  %view = load ptr, ptr %result
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  store ptr %view, ptr %at
  %failed = call i1 @kept(ptr %table, ptr %slot, i32 %status)
  ret i1 %failed
}}

; Whether a tensor has not the layout that tracing promised; strides count where a dimension has more than one element.
define i1 @mlc_layout(ptr %table, ptr %slot, i64 %rank, ptr %sizes, ptr %strides) {{
entry:
  %sizes.of = !aoti_torch_get_sizes
  %strides.of = !aoti_torch_get_strides
  %tensor = load ptr, ptr %slot
  %have = alloca ptr
  %step = alloca ptr
  %a = call i32 %sizes.of(ptr %tensor, ptr %have)
  %b = call i32 %strides.of(ptr %tensor, ptr %step)
  %ab = or i32 %a, %b
  %failed = icmp ne i32 %ab, 0
  br i1 %failed, label %differs, label %start
start:
  %have.at = load ptr, ptr %have
  %step.at = load ptr, ptr %step
  br label %loop
loop:
  %k = phi i64 [ 0, %start ], [ %next, %more ]
  %again = icmp ult i64 %k, %rank
  br i1 %again, label %look, label %same
look:
  %n.at = getelementptr inbounds i64, ptr %have.at, i64 %k
  %n = load i64, ptr %n.at
  %m.at = getelementptr inbounds i64, ptr %sizes, i64 %k
  %m = load i64, ptr %m.at
  %equal = icmp eq i64 %n, %m
  br i1 %equal, label %stride, label %differs
stride:
  %s.at = getelementptr inbounds i64, ptr %step.at, i64 %k
  %s = load i64, ptr %s.at
  %t.at = getelementptr inbounds i64, ptr %strides, i64 %k
  %t = load i64, ptr %t.at
  %agree = icmp eq i64 %s, %t
  %single = icmp slt i64 %n, 2
  %fine = or i1 %agree, %single
  br i1 %fine, label %more, label %differs
more:
  %next = add nuw i64 %k, 1
  br label %loop
same:
  ret i1 false
differs:
  ret i1 true
}}

; Whether a tensor has not the element type that tracing promised.
define i1 @mlc_dtype(ptr %table, ptr %slot, i32 %dtype) {{
  %dtype.of = !aoti_torch_get_dtype
  %tensor = load ptr, ptr %slot
  %at = alloca i32
  %status = call i32 %dtype.of(ptr %tensor, ptr %at)
  %have = load i32, ptr %at
  %failed = icmp ne i32 %status, 0
  %differs = icmp ne i32 %have, %dtype
  %bad = or i1 %failed, %differs
  ret i1 %bad
}}
"""
