"""The functions that a library exports, in LLVM IR. ``header.py`` has their text for C."""

from __future__ import annotations

from .calls import calls_text
from .codes import CODES, MESSAGE_BYTES, SAY
from .constants import Constants

EXPORTED = ("open", "context", "shapes", "call", "error", "signature", "close_context", "close")


def exported_names(model: str) -> list[str]:
    """What a library of that name shows."""
    return [f"{model}_{name}" for name in EXPORTED]


def interface_text(name: str, constants: Constants, functions: int, weights: int, words: int, signature: str) -> str:
    """The exported functions of the model ``name``."""
    told = _open(name, constants, weights) + _told(name, constants, functions, signature)
    return told + calls_text(name, constants, words)


def _open(name: str, constants: Constants, weights: int) -> str:
    t = constants.text
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
  %a = {SAY} {t("open: the folder and the place for the model may not be null pointers")})
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
  %b = {SAY} {t("open: the options have %u bytes by their first field; this library knows options of 24")}, i32 %bytes)
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
  %c = {SAY} {t("open: %d threads are asked for; it has to be 0 (as many as there are processors) to 65536")},
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
  %d = {SAY} {t("open: this processor lacks %s; the library needs at least %s")}, ptr %lacks, ptr %least)
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
  %e = {SAY} {t("open: the system has no memory left")})
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
  %a = {SAY} {t("context: the model and the place for the context may not be null pointers")})
  ret i32 {CODES["argument"]}
make:
  %context = call ptr @make_context(ptr %model)
  store ptr %context, ptr %result
  %none = icmp eq ptr %context, null
  br i1 %none, label %no.memory, label %done
no.memory:
  %b = {SAY} {t("context: the system has no memory left")})
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
"""


def _told(name: str, constants: Constants, functions: int, signature: str) -> str:
    t = constants.text
    return f"""
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
  %a = {SAY} {t("there is no function %d; the library has 0 to %d")}, i32 %number, i32 {functions - 1})
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
  %b = {SAY} {t("%s: the array of %lld inputs is a null pointer")}, ptr %name, i64 %count)
  ret ptr null
has.inputs:
  %results.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %results = load i64, ptr %results.at
  %some.results = icmp ne i64 %results, 0
  %no.out = icmp eq ptr %out, null
  %lacks.too = and i1 %some.results, %no.out
  br i1 %lacks.too, label %no.results, label %fine
no.results:
  %c = {SAY} {t("%s: the array of %lld results is a null pointer")}, ptr %name, i64 %results)
  ret ptr null
fine:
  ret ptr %f
}}
"""
