"""What every native host program calls: functions of LLVM IR that are the same for all of them.

A *table* of 64-bit words is what code is given of the process it runs in, so that code itself has no address in it:
first ``WORDS`` (objects and numbers), then ``FUNCTIONS`` of Python and torch, ``SUPPORT_FUNCTIONS``, and then what one
program asks for. A *frame* is the words that one run of a program works with: three a tensor (where the ``at::Tensor``
is, the same once more if the run owns it, the address of the data), then the objects that the run holds, then their
values as integers. *Codes* say how frames and Python's objects correspond, ``kind << 32 | word``.
"""

from __future__ import annotations

# How a value of a program is handed to Python, or taken from it.
TENSOR, OBJECT, SIZE, NOTHING = range(4)
# What an argument of a program is: bits of its description.
IS_TENSOR, IS_SIZE, DIES, UNUSED = 1, 2, 4, 8

WORDS = ("Tensor", "Parameter", "offset", "NotImplemented", "None", "OutOfRangeError", "TypeError")

WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
FUNCTIONS = (
    "PyList_Size", "PyList_GetItem", "PyList_SetSlice", "Py_IncRef", "Py_DecRef", "PyLong_AsLongLong",
    "PyLong_FromLongLong", "PyErr_Occurred", "PyErr_Clear", "PyErr_Format", "PyEval_SaveThread",
    "PyEval_RestoreThread", "PyTuple_New", "PyTuple_SetItem", "PyTuple_GetItem", "PyObject_Vectorcall",
    "PyType_IsSubtype", WRAP, "aoti_torch_get_data_ptr", "aoti_torch_get_sizes", "aoti_torch_get_strides",
    "aoti_torch_empty_strided", "aoti_torch_new_tensor_handle", "aoti_torch_delete_tensor_object",
    "aoti_torch__reinterpret_tensor",
)  # fmt: skip
SUPPORT_FUNCTIONS = (
    "mlc_enter", "mlc_leave", "mlc_drop", "mlc_make", "mlc_view", "mlc_layout", "mlc_part", "mlc_outside",
    "mlc_results", "mlc_find",
)  # fmt: skip

_PLACE = {name: k for k, name in enumerate((*WORDS, *FUNCTIONS, *SUPPORT_FUNCTIONS))}
OWN = len(_PLACE)
"""The first word of the table that is a program's own."""


def place(name: str) -> int:
    """The word of the table that holds an object, a number or a function."""
    return _PLACE[name]


def support_text() -> str:
    """The module of ``SUPPORT_FUNCTIONS``."""
    lines = []
    for line in _TEXT.splitlines():
        at = line.find("!")
        if at < 0:
            lines.append(line)
            continue
        # "%x = !name" reads a word of the table.
        left, name = line[:at], line[at + 1 :].strip()
        variable = left.strip().split(" ")[0]
        indent = left[: len(left) - len(left.lstrip())]
        kind = "i64" if name == "offset" else "ptr"
        lines.append(f"{indent}{variable}.at = getelementptr inbounds i64, ptr %table, i64 {_PLACE[name]}")
        lines.append(f"{indent}{variable} = load {kind}, ptr {variable}.at")
    return "\n".join(lines) + "\n"


def _message(name: str, text: str) -> str:
    return f'@{name} = internal constant [{len(text) + 1} x i8] c"{text}\\00"'


_TEXT = rf"""
{_message("index_message", "index %lld is out of bounds for dimension %lld with size %lld")}
{_message("type_message", "an op gave %R where tracing promised a tensor")}

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
; nobody else holds are the frame's own.
define i1 @mlc_enter(ptr %table, ptr %frame, ptr %list, i64 %count, ptr %kinds, i64 %objects, i64 %values) {{
entry:
  %size.of = !PyList_Size
  %item.of = !PyList_GetItem
  %inc = !Py_IncRef
  %dec = !Py_DecRef
  %integer = !PyLong_AsLongLong
  %occurred = !PyErr_Occurred
  %clear = !PyErr_Clear
  %cut = !PyList_SetSlice
  %new = !aoti_torch_new_tensor_handle
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
  %lost = call i1 @find(ptr %table, ptr %slot)
  br i1 %lost, label %wrong, label %more
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

; A new tensor in a slot, not initialised; true where there is no memory.
define i1 @mlc_make(ptr %table, ptr %slot, i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %device) {{
  %empty = !aoti_torch_empty_strided
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  %status = call i32 %empty(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %device, i32 0, ptr %at)
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

; A new reference to what a code stands for; null with an error set.
define internal ptr @box(ptr %table, ptr %frame, i64 %code, ptr %numbers) {{
entry:
  %kind = lshr i64 %code, 32
  %word = and i64 %code, 4294967295
  switch i64 %kind, label %nothing [
    i64 {TENSOR}, label %tensor
    i64 {OBJECT}, label %object
    i64 {SIZE}, label %size
  ]
tensor:
  %wrap = !{WRAP}
  %t.at = getelementptr inbounds i64, ptr %frame, i64 %word
  %t = load ptr, ptr %t.at
  %wrapped = call ptr %wrap(ptr %t)
  ret ptr %wrapped
object:
  %o.inc = !Py_IncRef
  %o.at = getelementptr inbounds i64, ptr %frame, i64 %word
  %o = load ptr, ptr %o.at
  call void %o.inc(ptr %o)
  ret ptr %o
size:
  %long = !PyLong_FromLongLong
  %n.at = getelementptr inbounds i64, ptr %numbers, i64 %word
  %n = load i64, ptr %n.at
  %number = call ptr %long(i64 %n)
  ret ptr %number
nothing:
  %n.inc = !Py_IncRef
  %none = !None
  call void %n.inc(ptr %none)
  ret ptr %none
}}

; Take an object as the tensor of a slot; true with an error set where it is none.
define internal i1 @take(ptr %table, ptr %slot, ptr %object) {{
entry:
  %type.at = getelementptr inbounds i8, ptr %object, i64 8
  %type = load ptr, ptr %type.at
  %tensor = !Tensor
  %subtype = !PyType_IsSubtype
  %is = call i32 %subtype(ptr %type, ptr %tensor)
  %yes = icmp ne i32 %is, 0
  br i1 %yes, label %good, label %bad
good:
  %offset = !offset
  %new = !aoti_torch_new_tensor_handle
  %inside = getelementptr inbounds i8, ptr %object, i64 %offset
  call void @mlc_drop(ptr %table, ptr %slot)
  %result = alloca ptr
  store ptr null, ptr %result
  %status = call i32 %new(ptr %inside, ptr %result)
  %handle = load ptr, ptr %result
  %at = getelementptr inbounds i64, ptr %slot, i64 1
  store ptr %handle, ptr %at
  store ptr %handle, ptr %slot
  ; What has no memory of its own (a wrapper) has no address either, and only ops see it.
  %lost = call i1 @find(ptr %table, ptr %slot)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %bad, label %done
done:
  ret i1 false
bad:
  %format = !PyErr_Format
  %class = !TypeError
  %raised = call ptr (ptr, ptr, ...) %format(ptr %class, ptr @type_message, ptr %object)
  ret i1 true
}}

; Call a function of Python's: "given" codes of its arguments, "wanted" codes of the results that are read. An object
; that is read has its value as an integer in the word "values" further on. True with an error set where it raised.
define i1 @mlc_part(ptr %table, ptr %function, ptr %frame, ptr %numbers, ptr %given, i64 %count, ptr %wanted,
                    i64 %results, i64 %values) {{
entry:
  %dec = !Py_DecRef
  %inc = !Py_IncRef
  %vector = !PyObject_Vectorcall
  %item.of = !PyTuple_GetItem
  %integer = !PyLong_AsLongLong
  %clear = !PyErr_Clear
  %room = add i64 %count, 1
  %arguments = alloca ptr, i64 %room
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %boxed ]
  %again = icmp ult i64 %k, %count
  br i1 %again, label %make, label %run
make:
  %code.at = getelementptr inbounds i64, ptr %given, i64 %k
  %code = load i64, ptr %code.at
  %object = call ptr @box(ptr %table, ptr %frame, i64 %code, ptr %numbers)
  %null = icmp eq ptr %object, null
  br i1 %null, label %clean, label %boxed
boxed:
  %argument.at = getelementptr inbounds ptr, ptr %arguments, i64 %k
  store ptr %object, ptr %argument.at
  %next = add nuw i64 %k, 1
  br label %loop
run:
  %result.run = call ptr %vector(ptr %function, ptr %arguments, i64 %count, ptr null)
  br label %clean
clean:
  %made = phi i64 [ %k, %make ], [ %count, %run ]
  %result = phi ptr [ null, %make ], [ %result.run, %run ]
  br label %release
release:
  %r = phi i64 [ 0, %clean ], [ %r.next, %release.do ]
  %r.again = icmp ult i64 %r, %made
  br i1 %r.again, label %release.do, label %released
release.do:
  %r.at = getelementptr inbounds ptr, ptr %arguments, i64 %r
  %r.object = load ptr, ptr %r.at
  call void %dec(ptr %r.object)
  %r.next = add nuw i64 %r, 1
  br label %release
released:
  %raised = icmp eq ptr %result, null
  br i1 %raised, label %failed, label %take
take:
  %t = phi i64 [ 0, %released ], [ %t.next, %took ]
  %t.again = icmp ult i64 %t, %results
  br i1 %t.again, label %take.do, label %all
take.do:
  %t.code.at = getelementptr inbounds i64, ptr %wanted, i64 %t
  %t.code = load i64, ptr %t.code.at
  %t.kind = lshr i64 %t.code, 32
  %t.word = and i64 %t.code, 4294967295
  %item = call ptr %item.of(ptr %result, i64 %t)
  %t.at = getelementptr inbounds i64, ptr %frame, i64 %t.word
  switch i64 %t.kind, label %took [
    i64 {TENSOR}, label %take.tensor
    i64 {OBJECT}, label %take.object
  ]
take.tensor:
  %no = call i1 @take(ptr %table, ptr %t.at, ptr %item)
  br i1 %no, label %lost, label %took
take.object:
  call void %inc(ptr %item)
  store ptr %item, ptr %t.at
  %value = call i64 %integer(ptr %item)
  call void %clear()
  %v.at = getelementptr inbounds i64, ptr %t.at, i64 %values
  store i64 %value, ptr %v.at
  br label %took
took:
  %t.next = add nuw i64 %t, 1
  br label %take
all:
  call void %dec(ptr %result)
  ret i1 false
lost:
  call void %dec(ptr %result)
  ret i1 true
failed:
  ret i1 true
}}

; The tuple of what codes stand for; null with an error set.
define ptr @mlc_results(ptr %table, ptr %frame, ptr %numbers, ptr %codes, i64 %count) {{
entry:
  %new = !PyTuple_New
  %set = !PyTuple_SetItem
  %dec = !Py_DecRef
  %tuple = call ptr %new(i64 %count)
  %none = icmp eq ptr %tuple, null
  br i1 %none, label %done, label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %boxed ]
  %again = icmp ult i64 %k, %count
  br i1 %again, label %make, label %done
make:
  %code.at = getelementptr inbounds i64, ptr %codes, i64 %k
  %code = load i64, ptr %code.at
  %object = call ptr @box(ptr %table, ptr %frame, i64 %code, ptr %numbers)
  %null = icmp eq ptr %object, null
  br i1 %null, label %failed, label %boxed
boxed:
  %status = call i32 %set(ptr %tuple, i64 %k, ptr %object)
  %next = add nuw i64 %k, 1
  br label %loop
failed:
  call void %dec(ptr %tuple)
  ret ptr null
done:
  ret ptr %tuple
}}

; The error of an index that data gave and that is out of range, as a kernel tells of it.
define void @mlc_outside(ptr %table, ptr %status) {{
  %format = !PyErr_Format
  %class = !OutOfRangeError
  %index.at = getelementptr inbounds i64, ptr %status, i64 1
  %index = load i64, ptr %index.at
  %dim.at = getelementptr inbounds i64, ptr %status, i64 2
  %dim = load i64, ptr %dim.at
  %extent.at = getelementptr inbounds i64, ptr %status, i64 3
  %extent = load i64, ptr %extent.at
  %raised = call ptr (ptr, ptr, ...) %format(ptr %class, ptr @index_message, i64 %index, i64 %dim, i64 %extent)
  ret void
}}
"""
