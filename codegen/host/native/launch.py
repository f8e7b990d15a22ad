"""How GPU kernels are launched: by machine code, through the driver's C interface.

What is known of a kernel are the words of its record (``runtime/gpu/records.py``): ``RECORD``, then ``VARIANTS`` times
``VARIANT_WORDS``. ``launcher`` is the address of ``cuLaunchKernel`` or of ``hipModuleLaunchKernel``, which take the
same arguments, ``early_launcher`` that of ``cuLaunchKernelEx``, or zero. A variant is machine code that takes for
granted which pointers are multiples of ``ALIGNMENT``, and whether indices fit into 32 bits: of the pointers that are,
those that the kernel asks about (``relaxable``) choose it, with the bit ``FAR`` where indices reach beyond
``INDEX_MAX``. Its words are that mask, the driver's function, threads in a block, bytes of shared memory, the number of
its parameters, and whether it waits for the kernel ahead by itself. Then it is launched early, before that one has
ended.

A thread launches under a context, and one that is new may have none. The words ``CONTEXT`` are the functions that ask
for a thread's context and set it, and the one of the GPU; zeros where the driver needs none (HIP). A program sees to it
once, where it begins.

Parameters are the kernel's pointers and sizes, then pointers to scratch memory (Triton's ``global_scratch`` and
``profile_scratch``), which are null: kernels that want such memory are launched by Python. The driver is given the
address of each parameter and copies as many bytes as it has, so a size of 32 bits is the low half of a word.
"""

from __future__ import annotations

from ...kernel import ALIGNMENT, INDEX_MAX
from .objects import NUMBERS

CONTEXT = ("get_context", "set_context", "context")
RECORD = ("pointers", "arguments", "relaxable", "variants", "null", "launcher", "early_launcher", *CONTEXT)
VARIANT_WORDS = 6
VARIANTS = 8
# Alignment of pointers is a mask in one word, and the last bit is that of indices.
MOST_POINTERS = 63
FAR = 1 << MOST_POINTERS

RECORD_BYTES = 8 * (len(RECORD) + VARIANTS * VARIANT_WORDS)
_AT = {name: 8 * k for k, name in enumerate(RECORD)}
_FIRST = 8 * len(RECORD)
CONTEXT_AT = _AT[CONTEXT[0]]
"""Bytes from the begin of a record to the words ``CONTEXT``."""

CONTEXTS = """
; Give a thread that has no context the one of the words. Not zero where the driver refuses.
define i32 @mlc_context(ptr %words) {
entry:
  %current.at = alloca ptr
  store ptr null, ptr %current.at
  %get = load ptr, ptr %words
  %needless = icmp eq ptr %get, null
  br i1 %needless, label %fine, label %ask
fine:
  ret i32 0
ask:
  %asked = call i32 %get(ptr %current.at)
  %current = load ptr, ptr %current.at
  %has = icmp ne ptr %current, null
  br i1 %has, label %fine, label %give
give:
  %set.at = getelementptr inbounds i64, ptr %words, i64 1
  %set = load ptr, ptr %set.at
  %context.at = getelementptr inbounds i64, ptr %words, i64 2
  %context = load ptr, ptr %context.at
  %status = call i32 %set(ptr %context)
  ret i32 %status
}
"""

# How a variant is found: the one for just these addresses and indices, which Python makes where it is not there yet.
_EXACT = """
  %fits = icmp eq i64 %has, %wanted"""
# Or the first that takes nothing for granted that does not hold; one for far indices is right for near ones.
_ENOUGH = f"""
  %assumed = and i64 %has, {FAR - 1}
  %absent = xor i64 %near, -1
  %lacking = and i64 %assumed, %absent
  %reaches = and i64 %has, {FAR - (1 << 64)}
  %short.of = icmp ult i64 %reaches, %far.bit
  %held = icmp eq i64 %lacking, 0
  %near.enough = xor i1 %short.of, true
  %fits = and i1 %held, %near.enough"""


def launch_text(*, exact: bool = True) -> str:
    """``@mlc_launch``, which takes the ``exact`` variant of a kernel, or else the first that is right for a call."""
    return _LAUNCH.replace("FITS", (_EXACT if exact else _ENOUGH).strip())


_LAUNCH = f"""
; Launch a kernel over "arguments", its addresses and then sizes, where the grid is not empty. Not zero where the driver
; refuses, and where no variant of the kernel is there for addresses that are aligned as these are and indices that
; reach so far.
define i32 @mlc_launch(ptr %record, ptr %arguments, i64 %x, i64 %y, i64 %z, i64 %reach, ptr %stream) {{
entry:
  %xy = mul i64 %x, %y
  %programs = mul i64 %xy, %z
  %empty = icmp eq i64 %programs, 0
  br i1 %empty, label %nothing, label %start
nothing:
  ret i32 0
start:
  %pointers = load i64, ptr %record
  %arguments.at = getelementptr inbounds i8, ptr %record, i64 {_AT["arguments"]}
  %given = load i64, ptr %arguments.at
  %relaxable.at = getelementptr inbounds i8, ptr %record, i64 {_AT["relaxable"]}
  %relaxable = load i64, ptr %relaxable.at
  %variants.at = getelementptr inbounds i8, ptr %record, i64 {_AT["variants"]}
  %variants = load atomic i64, ptr %variants.at acquire, align 8
  %null = getelementptr inbounds i8, ptr %record, i64 {_AT["null"]}
  %launcher.at = getelementptr inbounds i8, ptr %record, i64 {_AT["launcher"]}
  %launch = load ptr, ptr %launcher.at
  br label %align
align:
  %p = phi i64 [ 0, %start ], [ %p.next, %aligned ]
  %mask = phi i64 [ 0, %start ], [ %mask.next, %aligned ]
  %p.again = icmp ult i64 %p, %pointers
  br i1 %p.again, label %aligned, label %choose
aligned:
  %p.at = getelementptr inbounds i64, ptr %arguments, i64 %p
  %address = load i64, ptr %p.at
  %rest = and i64 %address, {ALIGNMENT - 1}
  %whole = icmp eq i64 %rest, 0
  %one = zext i1 %whole to i64
  %bit = shl i64 %one, %p
  %mask.next = or i64 %mask, %bit
  %p.next = add nuw i64 %p, 1
  br label %align
choose:
  %near = and i64 %mask, %relaxable
  %is.far = icmp ugt i64 %reach, {INDEX_MAX}
  %far = zext i1 %is.far to i64
  %far.bit = shl i64 %far, {MOST_POINTERS}
  %wanted = or i64 %near, %far.bit
  %first = getelementptr inbounds i8, ptr %record, i64 {_FIRST}
  br label %look
look:
  %v = phi i64 [ 0, %choose ], [ %v.next, %other ]
  %variant = phi ptr [ %first, %choose ], [ %variant.next, %other ]
  %v.again = icmp ult i64 %v, %variants
  br i1 %v.again, label %compare, label %unknown
unknown:
  ret i32 -1
compare:
  %has = load i64, ptr %variant
  FITS
  br i1 %fits, label %found, label %other
other:
  %v.next = add nuw i64 %v, 1
  %variant.next = getelementptr inbounds i64, ptr %variant, i64 {VARIANT_WORDS}
  br label %look
found:
  %function.at = getelementptr inbounds i64, ptr %variant, i64 1
  %function = load ptr, ptr %function.at
  %threads.at = getelementptr inbounds i64, ptr %variant, i64 2
  %threads = load i32, ptr %threads.at
  %shared.at = getelementptr inbounds i64, ptr %variant, i64 3
  %shared = load i32, ptr %shared.at
  %parameters.at = getelementptr inbounds i64, ptr %variant, i64 4
  %parameters = load i64, ptr %parameters.at
  %places = alloca ptr, i64 %parameters
  br label %place
place:
  %k = phi i64 [ 0, %found ], [ %k.next, %put ]
  %k.again = icmp ult i64 %k, %parameters
  br i1 %k.again, label %put, label %go
put:
  %k.at = getelementptr inbounds i64, ptr %arguments, i64 %k
  %is.argument = icmp ult i64 %k, %given
  %source = select i1 %is.argument, ptr %k.at, ptr %null
  %places.at = getelementptr inbounds ptr, ptr %places, i64 %k
  store ptr %source, ptr %places.at
  %k.next = add nuw i64 %k, 1
  br label %place
go:
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  %dependent.at = getelementptr inbounds i64, ptr %variant, i64 5
  %dependent = load i64, ptr %dependent.at
  %early.at = getelementptr inbounds i8, ptr %record, i64 {_AT["early_launcher"]}
  %early = load ptr, ptr %early.at
  %waits = icmp ne i64 %dependent, 0
  %can = icmp ne ptr %early, null
  %is.early = and i1 %waits, %can
  br i1 %is.early, label %soon, label %then
soon:
  ; CUlaunchConfig, with one CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  %config = alloca {{ [3 x i32], [3 x i32], i32, ptr, ptr, i32 }}
  %attribute = alloca {{ i32, i32, i32, [15 x i32] }}
  %x.at = getelementptr inbounds i32, ptr %config, i64 0
  %y.at = getelementptr inbounds i32, ptr %config, i64 1
  %z.at = getelementptr inbounds i32, ptr %config, i64 2
  %block.x = getelementptr inbounds i32, ptr %config, i64 3
  %block.y = getelementptr inbounds i32, ptr %config, i64 4
  %block.z = getelementptr inbounds i32, ptr %config, i64 5
  %bytes.at = getelementptr inbounds i32, ptr %config, i64 6
  %stream.at = getelementptr inbounds i64, ptr %config, i64 4
  %attributes.at = getelementptr inbounds i64, ptr %config, i64 5
  %count.at = getelementptr inbounds i64, ptr %config, i64 6
  store i32 %x32, ptr %x.at
  store i32 %y32, ptr %y.at
  store i32 %z32, ptr %z.at
  store i32 %threads, ptr %block.x
  store i32 1, ptr %block.y
  store i32 1, ptr %block.z
  store i32 %shared, ptr %bytes.at
  store ptr %stream, ptr %stream.at
  store ptr %attribute, ptr %attributes.at
  store i32 1, ptr %count.at
  store {{ i32, i32, i32, [15 x i32] }} zeroinitializer, ptr %attribute
  store i32 6, ptr %attribute
  %flag = getelementptr inbounds i32, ptr %attribute, i64 2
  store i32 1, ptr %flag
  %begun = call i32 %early(ptr %config, ptr %function, ptr %places, ptr null)
  ret i32 %begun
then:
  %status = call i32 %launch(ptr %function, i32 %x32, i32 %y32, i32 %z32, i32 %threads, i32 1, i32 1, i32 %shared,
                             ptr %stream, ptr %places, ptr null)
  ret i32 %status
}}
"""

LAUNCH = launch_text()

# As a function of Python's (METH_FASTCALL): its "self" is the address of a record, its arguments are the grid, how far
# indices reach, the stream, and those of the kernel. It returns the status.
LAUNCH_FROM_PYTHON = f"""{NUMBERS}
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define ptr @mlc_launch_from_python(ptr %self, ptr %given, i64 %count) {{
entry:
  %record = call ptr @PyLong_AsVoidPtr(ptr %self)
  %words = alloca i64, i64 %count, align 16
  %failed = call i1 @numbers_of(ptr %given, i64 %count, ptr %words)
  br i1 %failed, label %fail, label %run
run:
  %x = load i64, ptr %words
  %y.at = getelementptr inbounds i64, ptr %words, i64 1
  %y = load i64, ptr %y.at
  %z.at = getelementptr inbounds i64, ptr %words, i64 2
  %z = load i64, ptr %z.at
  %reach.at = getelementptr inbounds i64, ptr %words, i64 3
  %reach = load i64, ptr %reach.at
  %stream.at = getelementptr inbounds i64, ptr %words, i64 4
  %stream = load ptr, ptr %stream.at
  %arguments = getelementptr inbounds i64, ptr %words, i64 5
  %thread = call ptr @PyEval_SaveThread()
  %status = call i32 @mlc_launch(ptr %record, ptr %arguments, i64 %x, i64 %y, i64 %z, i64 %reach,
                              ptr %stream)
  call void @PyEval_RestoreThread(ptr %thread)
  %wide = sext i32 %status to i64
  %result = call ptr @PyLong_FromLongLong(i64 %wide)
  ret ptr %result
fail:
  ret ptr null
}}
"""

# As a function of Python's without arguments: its "self" is the address of the words.
CONTEXT_FROM_PYTHON = """
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLongLong(i64)

define ptr @mlc_context_from_python(ptr %self, ptr %given, i64 %count) {
  %words = call ptr @PyLong_AsVoidPtr(ptr %self)
  %status = call i32 @mlc_context(ptr %words)
  %wide = sext i32 %status to i64
  %result = call ptr @PyLong_FromLongLong(i64 %wide)
  ret ptr %result
}
"""
