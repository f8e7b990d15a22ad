"""The functions that a library exports, in LLVM IR. ``header.py`` has their text for C."""

from __future__ import annotations

from .checks import CODES, MESSAGE_BYTES
from .constants import Constants

EXPORTED = ("open", "context", "shapes", "call", "error", "signature", "close_context", "close")


def exported_names(model: str) -> list[str]:
    """What a library of that name shows."""
    return [f"{model}_{name}" for name in EXPORTED]


def interface_text(name: str, constants: Constants, functions: int, weights: int, words: int, signature: str) -> str:
    """The exported functions of the model ``name``."""
    t = constants.text
    say = f"call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 {MESSAGE_BYTES}, ptr"
    return f"""
@failure = internal thread_local global [{MESSAGE_BYTES} x i8] zeroinitializer

; --- open and close ---------------------------------------------------------------------------------------------------

define i32 @{name}_open(ptr %folder, ptr %options, ptr %result) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  store i8 0, ptr %text
  %no.folder = icmp eq ptr %folder, null
  %no.result = icmp eq ptr %result, null
  %missing = or i1 %no.folder, %no.result
  br i1 %missing, label %nothing, label %begin
nothing:
  %a = {say} {t("open: the folder and the place for the model may not be null pointers")})
  ret i32 {CODES["argument"]}
begin:
  store ptr null, ptr %result
  %none = icmp eq ptr %options, null
  br i1 %none, label %processor, label %read
read:
  %bytes = load i32, ptr %options
  %known = icmp eq i32 %bytes, 24
  br i1 %known, label %given, label %foreign
foreign:
  %b = {say} {t("open: the options have %u bytes by their first field; this library knows options of 24")}, i32 %bytes)
  ret i32 {CODES["argument"]}
given:
  %threads.at = getelementptr inbounds {{ i32, i32, ptr, ptr }}, ptr %options, i32 0, i32 1
  %threads.given = load i32, ptr %threads.at
  %host.at = getelementptr inbounds {{ i32, i32, ptr, ptr }}, ptr %options, i32 0, i32 2
  %host.given = load ptr, ptr %host.at
  %passed.at = getelementptr inbounds {{ i32, i32, ptr, ptr }}, ptr %options, i32 0, i32 3
  %passed.given = load ptr, ptr %passed.at
  %negative = icmp slt i32 %threads.given, 0
  %many = icmp sgt i32 %threads.given, 65536
  %wrong = or i1 %negative, %many
  br i1 %wrong, label %uncounted, label %processor
uncounted:
  %c = {say} {t("open: %d threads are asked for; it has to be 0 (as many as there are processors) to 65536")},
      i32 %threads.given)
  ret i32 {CODES["argument"]}
processor:
  %threads = phi i32 [ 0, %begin ], [ %threads.given, %given ]
  %host = phi ptr [ null, %begin ], [ %host.given, %given ]
  %passed = phi ptr [ null, %begin ], [ %passed.given, %given ]
  %lacks = call ptr @choose()
  %able = icmp eq ptr %lacks, null
  br i1 %able, label %map, label %unable
unable:
  %least.at = getelementptr inbounds %Variant, ptr @least, i32 0, i32 3
  %least = load ptr, ptr %least.at
  %d = {say} {t("open: this processor lacks %s; the library needs at least %s")}, ptr %lacks, ptr %least)
  ret i32 {CODES["processor"]}
map:
  %mapped = call ptr @map_weights(ptr %text, ptr %folder)
  %unmapped = icmp eq ptr %mapped, null
  br i1 %unmapped, label %no.file, label %make
no.file:
  ret i32 {CODES["file"]}
make:
  %model = call ptr @calloc(i64 1, i64 ptrtoint (ptr getelementptr (%Model, ptr null, i32 1) to i64))
  %no.model = icmp eq ptr %model, null
  br i1 %no.model, label %no.memory, label %places
places:
  store ptr %mapped, ptr %model
  %weights = call ptr @calloc(i64 {max(weights, 1)}, i64 8)
  %no.weights = icmp eq ptr %weights, null
  br i1 %no.weights, label %no.places, label %fill
fill:
  %weights.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 1
  store ptr %weights, ptr %weights.at
  call void @point_to_weights(ptr %mapped, ptr %weights)
  %holders.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 2
  store i32 1, ptr %holders.at
  %team = getelementptr inbounds %Model, ptr %model, i32 0, i32 3
  %seated = call i1 @team_init(ptr %team, i32 %threads, ptr %host, ptr %passed)
  br i1 %seated, label %done, label %no.seats
done:
  store ptr %model, ptr %result
  ret i32 0
no.seats:
  call void @free(ptr %weights)
  br label %no.places
no.places:
  call void @free(ptr %model)
  br label %no.memory
no.memory:
  call void @unmap_weights(ptr %mapped)
  %e = {say} {t("open: the system has no memory left")})
  ret i32 {CODES["memory"]}
}}

define void @{name}_close(ptr %model) {{
  %none = icmp eq ptr %model, null
  br i1 %none, label %done, label %drop
drop:
  call void @drop_model(ptr %model)
  br label %done
done:
  ret void
}}

define i32 @{name}_context(ptr %model, ptr %result) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  store i8 0, ptr %text
  %no.model = icmp eq ptr %model, null
  %no.result = icmp eq ptr %result, null
  %missing = or i1 %no.model, %no.result
  br i1 %missing, label %nothing, label %make
nothing:
  %a = {say} {t("context: the model and the place for the context may not be null pointers")})
  ret i32 {CODES["argument"]}
make:
  %context = call ptr @make_context(ptr %model)
  store ptr %context, ptr %result
  %none = icmp eq ptr %context, null
  br i1 %none, label %no.memory, label %done
no.memory:
  %b = {say} {t("context: the system has no memory left")})
  ret i32 {CODES["memory"]}
done:
  ret i32 0
}}

define void @{name}_close_context(ptr %context) {{
  %none = icmp eq ptr %context, null
  br i1 %none, label %done, label %drop
drop:
  %model = load ptr, ptr %context
  call void @free_context(ptr %context)
  call void @drop_model(ptr %model)
  br label %done
done:
  ret void
}}

; --- what is told -----------------------------------------------------------------------------------------------------

define ptr @{name}_error(ptr %context) {{
  %none = icmp eq ptr %context, null
  br i1 %none, label %thread, label %own
thread:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  ret ptr %text
own:
  %message = getelementptr inbounds %Context, ptr %context, i32 0, i32 7
  ret ptr %message
}}

define ptr @{name}_signature() {{
  ret ptr {t(signature)}
}}

; The function of that number, where there is memory for tensors too; null with a sentence where not.
define internal ptr @function_of(ptr %text, i32 %number, ptr %in, ptr %out) {{
  %there = icmp ult i32 %number, {functions}
  br i1 %there, label %found, label %unknown
unknown:
  %a = {say} {t("there is no function %d; the library has 0 to %d")}, i32 %number, i32 {functions - 1})
  ret ptr null
found:
  %f = getelementptr inbounds %Function, ptr @functions, i32 %number
  %name = load ptr, ptr %f
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %count = load i64, ptr %count.at
  %some = icmp ne i64 %count, 0
  %no.in = icmp eq ptr %in, null
  %lacks = and i1 %some, %no.in
  br i1 %lacks, label %no.inputs, label %has.inputs
no.inputs:
  %b = {say} {t("%s: the array of %lld inputs is a null pointer")}, ptr %name, i64 %count)
  ret ptr null
has.inputs:
  %results.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %results = load i64, ptr %results.at
  %some.results = icmp ne i64 %results, 0
  %no.out = icmp eq ptr %out, null
  %lacks.too = and i1 %some.results, %no.out
  br i1 %lacks.too, label %no.results, label %fine
no.results:
  %c = {say} {t("%s: the array of %lld results is a null pointer")}, ptr %name, i64 %results)
  ret ptr null
fine:
  ret ptr %f
}}

; --- shapes -----------------------------------------------------------------------------------------------------------

define i32 @{name}_shapes(ptr %model, i32 %number, ptr %in, ptr %out) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  store i8 0, ptr %text
  %no.model = icmp eq ptr %model, null
  br i1 %no.model, label %nothing, label %which
nothing:
  %a = {say} {t("shapes: the model may not be a null pointer")})
  ret i32 {CODES["argument"]}
which:
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
  %b = {say} {t("shapes: the system has no memory left")})
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

; Write kinds, shapes and strides of the results.
define internal i32 @tell_shapes(ptr %text, ptr %f, ptr %values, ptr %out) {{
entry:
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 3
  %specs = load ptr, ptr %specs.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %count = load i64, ptr %count.at
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %next ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %one, label %done
one:
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %k
  %tensor = getelementptr inbounds %Tensor, ptr %out, i64 %k
  %rank.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 1
  %rank = load i32, ptr %rank.at
  %first.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 4
  %first = load i64, ptr %first.at
  %extents = getelementptr inbounds i64, ptr %values, i64 %first
  %kind.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 1
  store i32 1, ptr %kind.at
  %id.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 2
  store i32 0, ptr %id.at
  %given.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 3
  store i32 %rank, ptr %given.at
  %packed.at = getelementptr inbounds %Spec, ptr %spec, i32 0, i32 2
  %packed = load i32, ptr %packed.at
  %type.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 4
  store i32 %packed, ptr %type.at
  %offset.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 9
  store i64 0, ptr %offset.at
  %wide = zext i32 %rank to i64
  %bytes = shl i64 %wide, 3
  %scalar = icmp eq i32 %rank, 0
  br i1 %scalar, label %next, label %extent
extent:
  %shape.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 7
  %shape = load ptr, ptr %shape.at
  %none = icmp eq ptr %shape, null
  br i1 %none, label %missing, label %write
missing:
  %f.name = load ptr, ptr %f
  %name = load ptr, ptr %spec
  %a = {say} {t("%s: result %lld (%s) has %d dimensions, and there is no memory for its shape")}, ptr %f.name, i64 %k,
      ptr %name, i32 %rank)
  ret i32 {CODES["argument"]}
write:
  call void @llvm.memcpy.p0.p0.i64(ptr %shape, ptr %extents, i64 %bytes, i1 false)
  %strides.at = getelementptr inbounds %Tensor, ptr %tensor, i32 0, i32 8
  %strides = load ptr, ptr %strides.at
  %dense = icmp eq ptr %strides, null
  br i1 %dense, label %next, label %write.strides
write.strides:
  %computed = getelementptr inbounds i64, ptr %extents, i64 %wide
  call void @llvm.memcpy.p0.p0.i64(ptr %strides, ptr %computed, i64 %bytes, i1 false)
  br label %next
next:
  %k.next = add i64 %k, 1
  br label %each
done:
  ret i32 0
}}

; --- calls ------------------------------------------------------------------------------------------------------------

define i32 @{name}_call(ptr %context, i32 %number, ptr %in, ptr %out) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  %none = icmp eq ptr %context, null
  br i1 %none, label %nothing, label %claim
nothing:
  %a = {say} {t("call: the context may not be a null pointer")})
  ret i32 {CODES["argument"]}
claim:
  %busy.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 1
  %swap = cmpxchg ptr %busy.at, i32 0, i32 1 acquire monotonic
  %free = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %free, label %run, label %busy
busy:
  ; The sentence of the context is the other call's.
  %b = {say} {t("call: this context is in another call; each thread needs a context of its own")})
  ret i32 {CODES["argument"]}
run:
  %message = getelementptr inbounds %Context, ptr %context, i32 0, i32 7
  store i8 0, ptr %message
  %code = call i32 @checked_call(ptr %message, ptr %context, i32 %number, ptr %in, ptr %out)
  store atomic i32 0, ptr %busy.at release, align 4
  ret i32 %code
}}

; A call of a context that no other call has.
define internal i32 @checked_call(ptr %text, ptr %context, i32 %number, ptr %in, ptr %out) {{
entry:
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
  br i1 %b.fine, label %arena.grown, label %fail
arena.grown:
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
  %told = call i32 %host(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status)
  store ptr %before, ptr %own
  %good = icmp eq i32 %told, 0
  br i1 %good, label %done, label %wrong
done:
  ret i32 0
wrong:
  call void @tell_status(ptr %text, ptr %f, ptr %status)
  ret i32 {CODES["index"]}
fail:
  %code = phi i32 [ %a, %inputs.checked ], [ %b, %memory.checked ], [ %c, %arena.grown ]
  ret i32 %code
}}

; What a kernel has told: a wrong index (1), or a division of integers by zero (2).
define internal void @tell_status(ptr %text, ptr %f, ptr %status) {{
  %f.name = load ptr, ptr %f
  %what = load i64, ptr %status
  %launch.at = getelementptr inbounds i64, ptr %status, i64 4
  %launch = load i64, ptr %launch.at
  %divides = icmp eq i64 %what, 2
  br i1 %divides, label %divisor, label %index
divisor:
  %a = {say} {t("%s: launch %lld divides an integer by zero")}, ptr %f.name, i64 %launch)
  ret void
index:
  %index.at = getelementptr inbounds i64, ptr %status, i64 1
  %value = load i64, ptr %index.at
  %dim.at = getelementptr inbounds i64, ptr %status, i64 2
  %dim = load i64, ptr %dim.at
  %extent.at = getelementptr inbounds i64, ptr %status, i64 3
  %extent = load i64, ptr %extent.at
  %b = {say} {t("%s: launch %lld was given the index %lld, which is out of range for dimension %lld with size %lld")},
      ptr %f.name, i64 %launch, i64 %value, i64 %dim, i64 %extent)
  ret void
}}
"""
