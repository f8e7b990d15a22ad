"""What native host programs do with objects of Python's: hand values over, call functions, raise errors."""

from __future__ import annotations

from .table import OBJECT, SIZE, TENSOR, WRAP


def message(name: str, text: str) -> str:
    """A constant of C characters."""
    return f'@{name} = internal constant [{len(text) + 1} x i8] c"{text}\\00"'


# "format" is PyErr_Format, "class" and "divided" are those of the errors, "status" the four words in which a kernel
# tells of an index (1, itself, its dimension, the extent of that), or that it divides an integer by zero (2).
OUTSIDE = f"""
{message("index_message", "index %lld is out of bounds for dimension %lld with size %lld")}
{message("divisor_message", "ZeroDivisionError: an integer is divided by zero")}

define internal void @raise_outside(ptr %format, ptr %class, ptr %divided, ptr %status) {{
  %what = load i64, ptr %status
  %divides = icmp eq i64 %what, 2
  br i1 %divides, label %divisor, label %index.told
divisor:
  %raised.too = call ptr (ptr, ptr, ...) %format(ptr %divided, ptr @divisor_message)
  ret void
index.told:
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

# What C functions of integers (METH_FASTCALL) are given.
NUMBERS = """
declare i64 @PyLong_AsUnsignedLongLongMask(ptr)
declare ptr @PyErr_Occurred()

; Integers of Python's as words, one behind the other; true, with an error set, where an object is none.
define internal i1 @numbers_of(ptr %objects, i64 %count, ptr %words) {
entry:
  %none = icmp eq i64 %count, 0
  br i1 %none, label %done, label %convert
convert:
  %k = phi i64 [ 0, %entry ], [ %next, %convert ]
  %from = getelementptr inbounds ptr, ptr %objects, i64 %k
  %object = load ptr, ptr %from
  %value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object)
  %to = getelementptr inbounds i64, ptr %words, i64 %k
  store i64 %value, ptr %to
  %next = add nuw i64 %k, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %convert, label %done
done:
  %error = call ptr @PyErr_Occurred()
  %failed = icmp ne ptr %error, null
  ret i1 %failed
}
"""

OBJECTS = f"""
{message("type_message", "an op gave %R where tracing promised a tensor")}

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

; New references to what a row of codes stands for; how many were made, which is not all of them where an error is set.
define internal i64 @row(ptr %table, ptr %frame, ptr %numbers, ptr %codes, i64 %count, ptr %objects) {{
entry:
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %boxed ]
  %again = icmp ult i64 %k, %count
  br i1 %again, label %make, label %done
make:
  %code.at = getelementptr inbounds i64, ptr %codes, i64 %k
  %code = load i64, ptr %code.at
  %object = call ptr @box(ptr %table, ptr %frame, i64 %code, ptr %numbers)
  %null = icmp eq ptr %object, null
  br i1 %null, label %done, label %boxed
boxed:
  %at = getelementptr inbounds ptr, ptr %objects, i64 %k
  store ptr %object, ptr %at
  %next = add nuw i64 %k, 1
  br label %loop
done:
  ret i64 %k
}}

; Give the references of a row back.
define internal void @release(ptr %table, ptr %objects, i64 %count) {{
entry:
  %dec = !Py_DecRef
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %give ]
  %again = icmp ult i64 %k, %count
  br i1 %again, label %give, label %done
give:
  %at = getelementptr inbounds ptr, ptr %objects, i64 %k
  %object = load ptr, ptr %at
  call void %dec(ptr %object)
  %next = add nuw i64 %k, 1
  br label %loop
done:
  ret void
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
  %made = call i64 @row(ptr %table, ptr %frame, ptr %numbers, ptr %given, i64 %count, ptr %arguments)
  %whole = icmp eq i64 %made, %count
  br i1 %whole, label %run, label %done
run:
  %result.run = call ptr %vector(ptr %function, ptr %arguments, i64 %count, ptr null)
  br label %done
done:
  %result = phi ptr [ null, %entry ], [ %result.run, %run ]
  call void @release(ptr %table, ptr %arguments, i64 %made)
  %raised = icmp eq ptr %result, null
  br i1 %raised, label %failed, label %take
take:
  %t = phi i64 [ 0, %done ], [ %t.next, %took ]
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
  %room = add i64 %count, 1
  %objects = alloca ptr, i64 %room
  %made = call i64 @row(ptr %table, ptr %frame, ptr %numbers, ptr %codes, i64 %count, ptr %objects)
  %whole = icmp eq i64 %made, %count
  br i1 %whole, label %join, label %failed
join:
  %tuple = call ptr %new(i64 %count)
  %none = icmp eq ptr %tuple, null
  br i1 %none, label %failed, label %loop
loop:
  %k = phi i64 [ 0, %join ], [ %next, %put ]
  %again = icmp ult i64 %k, %count
  br i1 %again, label %put, label %done
put:
  %at = getelementptr inbounds ptr, ptr %objects, i64 %k
  %object = load ptr, ptr %at
  %status = call i32 %set(ptr %tuple, i64 %k, ptr %object)
  %next = add nuw i64 %k, 1
  br label %loop
done:
  ret ptr %tuple
failed:
  call void @release(ptr %table, ptr %objects, i64 %made)
  ret ptr null
}}

; The error that data made, as a kernel tells of it: an index that is out of range, a divisor that is zero.
define void @mlc_outside(ptr %table, ptr %status) {{
  %format = !PyErr_Format
  %class = !OutOfRangeError
  %divided = !DivisionByZeroError
  call void @raise_outside(ptr %format, ptr %class, ptr %divided, ptr %status)
  ret void
}}
"""
