"""Calls of a library, and the shapes of their results, in LLVM IR."""

from __future__ import annotations

from .codes import CODES, DEVICE, MISPLACED, REFUSED, SAY, TOO_LARGE
from .constants import Constants
from .routine import Routine

# Where tensors have to be.
_LOOK = "call void @look_for(ptr %model)"
# How a call runs, and what a launch may have told, on CPUs and on GPUs.
_GIVEN = "ptr %text, ptr %context, ptr %f, ptr %values, ptr %sizes, ptr %inputs, ptr %results, ptr %status"
_RUN = f"""
  %ran = call i32 @run_call({_GIVEN})
  ret i32 %ran"""
_RUN_ON_GPU = f"""
  %entered = call i32 @enter(ptr %text, ptr %f, ptr %context)
  %is.in = icmp eq i32 %entered, 0
  br i1 %is.in, label %inside, label %outside
outside:
  ret i32 %entered
inside:
  %ran = call i32 @run_call({_GIVEN})
  %left = call i32 @leave(ptr %text, ptr %f, ptr %context, i32 %ran)
  ret i32 %left"""
_GPU_CASES = f"""i64 {REFUSED}, label %refused
    i64 {MISPLACED}, label %misplaced"""


def calls_text(name: str, constants: Constants, words: int, gpu: bool = False) -> str:
    """``NAME_shapes`` and ``NAME_call``, of a model on a GPU or none; the checks take so many words of scratch."""
    return _shapes(name, constants, words, gpu) + _calls(name, constants, gpu)


def _refused(constants: Constants) -> str:
    """What the driver refused, and what lies where a kernel cannot read it."""
    t = constants.text
    return f"""refused:
  %status.at = getelementptr inbounds i64, ptr %status, i64 1
  %code = load i32, ptr %status.at
  %kernel.at = getelementptr inbounds i64, ptr %status, i64 2
  %kernel = load ptr, ptr %kernel.at
  %function.at = getelementptr inbounds i64, ptr %status, i64 3
  %function = load ptr, ptr %function.at
  %whose = alloca [256 x i8]
  %c = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %whose, i64 256, ptr {t("%s: launch %lld (%s)")}, ptr %f.name,
      i64 %launch, ptr %kernel)
  %told = call i32 @driver_failed(ptr %text, ptr %whose, ptr %function, i32 %code)
  ret i32 %told
misplaced:
  %name.at = getelementptr inbounds i64, ptr %status, i64 2
  %name = load ptr, ptr %name.at
  %d = {SAY} {t("%s: launch %lld (%s) copies tiles of a tensor that does not begin at a multiple of 16 bytes")},
      ptr %f.name, i64 %launch, ptr %name)
  ret i32 {CODES["tensor"]}
"""


def _shapes(name: str, constants: Constants, words: int, gpu: bool) -> str:
    t = constants.text
    look = _LOOK if gpu else ""
    return f"""
; --- shapes -----------------------------------------------------------------------------------------------------------

define i32 @{name}_shapes(ptr %model, i32 %number, ptr %in, ptr %out) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  store i8 0, ptr %text
  %no.model = icmp eq ptr %model, null
  br i1 %no.model, label %nothing, label %which
nothing:
  %a = {SAY} {t("shapes: the model may not be a null pointer")})
  ret i32 {CODES["argument"]}
which:
  {look}
  %f = call ptr @function_of(ptr %text, i32 %number, ptr %in, ptr %out)
  %unknown = icmp eq ptr %f, null
  br i1 %unknown, label %refuse, label %room
refuse:
  ret i32 {CODES["argument"]}
room:
  %values = call ptr @calloc(i64 {max(words, 1)}, i64 8)
  %no.values = icmp eq ptr %values, null
  br i1 %no.values, label %no.memory, label %check
no.memory:
  %b = {SAY} {t("shapes: the system has no memory left")})
  ret i32 {CODES["memory"]}
check:
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 8
  %count = load i64, ptr %count.at
  %sizes = getelementptr inbounds i64, ptr %values, i64 %count
  %code = call i32 @check_inputs(ptr %text, ptr %f, ptr %in, ptr %values, ptr %sizes)
  %fine = icmp eq i32 %code, 0
  br i1 %fine, label %tell, label %end
tell:
  %told = call i32 @tell_shapes(ptr %text, ptr %f, ptr %values, ptr %out)
  br label %end
end:
  %status = phi i32 [ %code, %check ], [ %told, %tell ]
  call void @free(ptr %values)
  ret i32 %status
}}
""" + _tell_shapes(constants, gpu)


def _tell_shapes(constants: Constants, gpu: bool) -> str:
    t, r = constants.text, Routine()
    number = "0"
    if gpu:
        own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @device_number)")
        number = r.value(f"load i32, ptr {own}")
    function = r.value("load ptr, ptr %f")
    specs, count = r.load("ptr", "%Function", "%f", 3), r.load("i64", "%Function", "%f", 4)
    with r.each(count, "result") as k:
        spec, tensor = r.item("%Spec", specs, k), r.item("%Tensor", "%out", k)
        name, rank = r.load("ptr", "%Spec", spec, 0), r.load("i32", "%Spec", spec, 1)
        kind, first = r.load("i32", "%Spec", spec, 2), r.load("i64", "%Spec", spec, 4)
        for field, type_, value in (
            (1, "i32", DEVICE[gpu]), (2, "i32", number), (3, "i32", rank), (4, "i32", kind), (9, "i64", 0),
        ):  # fmt: skip
            r.store(type_, value, "%Tensor", tensor, field)
        wide = r.value(f"zext i32 {rank} to i64")
        nbytes, extents = r.value(f"shl i64 {wide}, 3"), r.item("i64", "%values", first)
        with r.when(r.value(f"icmp ne i32 {rank}, 0"), "extents"):
            shape, strides = r.load("ptr", "%Tensor", tensor, 7), r.load("ptr", "%Tensor", tensor, 8)
            with r.when(r.value(f"icmp eq ptr {shape}, null"), "missing"):
                told = t("%s: result %lld (%s) has %d dimensions, and there is no memory for its shape")
                r.value(f"{SAY} {told}, ptr {function}, i64 {k}, ptr {name}, i32 {rank})")
                r.line(f"ret i32 {CODES['argument']}")
            r.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {shape}, ptr {extents}, i64 {nbytes}, i1 false)")
            with r.when(r.value(f"icmp ne ptr {strides}, null"), "strides"):
                computed = r.item("i64", extents, wide)
                r.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {strides}, ptr {computed}, i64 {nbytes}, i1 false)")
    r.line("ret i32 0")
    return r.text(
        "\n; Write kinds, shapes and strides of the results.\n"
        "define internal i32 @tell_shapes(ptr %text, ptr %f, ptr %values, ptr %out)"
    )


def _calls(name: str, constants: Constants, gpu: bool) -> str:
    t = constants.text
    look, run = (_LOOK, _RUN_ON_GPU) if gpu else ("", _RUN)
    cases, refused = (_GPU_CASES, _refused(constants)) if gpu else ("", "")
    return f"""
; --- calls ------------------------------------------------------------------------------------------------------------

define i32 @{name}_call(ptr %context, i32 %number, ptr %in, ptr %out) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  %none = icmp eq ptr %context, null
  br i1 %none, label %nothing, label %claim
nothing:
  %a = {SAY} {t("call: the context may not be a null pointer")})
  ret i32 {CODES["argument"]}
claim:
  %busy.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 1
  %swap = cmpxchg ptr %busy.at, i32 0, i32 1 acquire monotonic
  %free = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %free, label %run, label %busy
busy:
  ; The sentence of the context is the other call's.
  %b = {SAY} {t("call: this context is in another call; each thread needs a context of its own")})
  ret i32 {CODES["argument"]}
run:
  %message = getelementptr inbounds %Context, ptr %context, i32 0, i32 7
  store i8 0, ptr %message
  %code = call i32 @checked_call(ptr %message, ptr %context, i32 %number, ptr %in, ptr %out)
  store atomic i32 0, ptr %busy.at release, align 4
  ret i32 %code
}}

; The context whose call this thread is in.
@calling = internal thread_local global ptr null

; A call of a context that no other call has.
define internal i32 @checked_call(ptr %text, ptr %context, i32 %number, ptr %in, ptr %out) {{
entry:
  %model = load ptr, ptr %context
  {look}
  %f = call ptr @function_of(ptr %text, i32 %number, ptr %in, ptr %out)
  %unknown = icmp eq ptr %f, null
  br i1 %unknown, label %refuse, label %inputs.checked
refuse:
  ret i32 {CODES["argument"]}
inputs.checked:
  ; The words of the context: values, sizes, addresses of inputs and results, their ends, status.
  %words.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 6
  %values = load ptr, ptr %words.at
  %values.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 8
  %values.count = load i64, ptr %values.at
  %sizes = getelementptr inbounds i64, ptr %values, i64 %values.count
  %sizes.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 6
  %sizes.count = load i64, ptr %sizes.at
  %inputs = getelementptr inbounds i64, ptr %sizes, i64 %sizes.count
  %inputs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %inputs.count = load i64, ptr %inputs.at
  %results = getelementptr inbounds i64, ptr %inputs, i64 %inputs.count
  %results.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %results.count = load i64, ptr %results.at
  %input.ends = getelementptr inbounds i64, ptr %results, i64 %results.count
  %result.ends = getelementptr inbounds i64, ptr %input.ends, i64 %inputs.count
  %status = getelementptr inbounds i64, ptr %result.ends, i64 %results.count
  %a = call i32 @check_inputs(ptr %text, ptr %f, ptr %in, ptr %values, ptr %sizes)
  %a.fine = icmp eq i32 %a, 0
  br i1 %a.fine, label %memory.checked, label %fail
memory.checked:
  %b = call i32 @check_memory(ptr %text, ptr %f, ptr %in, ptr %out, ptr %values, ptr %inputs, ptr %results,
                              ptr %input.ends, ptr %result.ends)
  %b.fine = icmp eq i32 %b, 0
  br i1 %b.fine, label %run, label %fail
run:
  {run.strip()}
fail:
  %code = phi i32 [ %a, %inputs.checked ], [ %b, %memory.checked ]
  ret i32 %code
}}

; Run a function whose tensors have been checked.
define internal i32 @run_call(ptr %text, ptr %context, ptr %f, ptr %values, ptr %sizes, ptr %inputs, ptr %results,
                              ptr %status) {{
  %place.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 13
  %place = load i64, ptr %place.at
  %needed.at = getelementptr inbounds i64, ptr %values, i64 %place
  %needed = load i64, ptr %needed.at
  %c = call i32 @grow_arena(ptr %text, ptr %f, ptr %context, i64 %needed)
  %c.fine = icmp eq i32 %c, 0
  br i1 %c.fine, label %go, label %fail
go:
  call void @llvm.memset.p0.i64(ptr %status, i8 0, i64 40, i1 false)
  %weights.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 4
  %weights = load ptr, ptr %weights.at
  %arena.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 2
  %arena = load ptr, ptr %arena.at
  %host.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 12
  %host = load ptr, ptr %host.at
  ; Meanwhile this thread begins rounds of the model's team.
  %model = load ptr, ptr %context
  %team = getelementptr inbounds %Model, ptr %model, i32 0, i32 3
  %own = call ptr @llvm.threadlocal.address.p0(ptr @own)
  %before = load ptr, ptr %own
  store ptr %team, ptr %own
  %calling = call ptr @llvm.threadlocal.address.p0(ptr @calling)
  %caller = load ptr, ptr %calling
  store ptr %context, ptr %calling
  %told = call i32 %host(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status)
  store ptr %before, ptr %own
  store ptr %caller, ptr %calling
  %good = icmp eq i32 %told, 0
  br i1 %good, label %done, label %wrong
done:
  ret i32 0
wrong:
  %what = call i32 @tell_status(ptr %text, ptr %f, ptr %status)
  ret i32 %what
fail:
  ret i32 %c
}}

; What a kernel has told: a wrong index (1), or a division of integers by zero (2).
define internal i32 @tell_status(ptr %text, ptr %f, ptr %status) {{
  %f.name = load ptr, ptr %f
  %what = load i64, ptr %status
  %launch.at = getelementptr inbounds i64, ptr %status, i64 4
  %launch = load i64, ptr %launch.at
  switch i64 %what, label %index [
    i64 2, label %divisor
    i64 {TOO_LARGE}, label %large
    {cases}
  ]
large:
  %size.at = getelementptr inbounds i64, ptr %status, i64 1
  %size = load i64, ptr %size.at
  %e = {SAY} {t("%s: launch %lld is a product with a size of %lld, which is more than CBLAS takes")}, ptr %f.name,
      i64 %launch, i64 %size)
  ret i32 {CODES["size"]}
divisor:
  %a = {SAY} {t("%s: launch %lld divides an integer by zero")}, ptr %f.name, i64 %launch)
  ret i32 {CODES["index"]}
index:
  %index.at = getelementptr inbounds i64, ptr %status, i64 1
  %value = load i64, ptr %index.at
  %dim.at = getelementptr inbounds i64, ptr %status, i64 2
  %dim = load i64, ptr %dim.at
  %extent.at = getelementptr inbounds i64, ptr %status, i64 3
  %extent = load i64, ptr %extent.at
  %b = {SAY} {t("%s: launch %lld was given the index %lld, which is out of range for dimension %lld with size %lld")},
      ptr %f.name, i64 %launch, i64 %value, i64 %dim, i64 %extent)
  ret i32 {CODES["index"]}
{refused}}}
"""
