"""The functions that a library exports, in LLVM IR. ``header.py`` has their text for C."""

from __future__ import annotations

from .calls import calls_text
from .codes import CODES, SAY
from .constants import Constants
from .opening import FAILURE, Opened, open_text

EXPORTED = ("open", "context", "shapes", "call", "error", "signature", "close_context", "close")


def exported_names(model: str, *more: str) -> list[str]:
    """What a library of that name shows; some have functions more."""
    return [f"{model}_{name}" for name in (*EXPORTED, *more)]


def interface_text(
    name: str, constants: Constants, functions: int, weights: int, words: int, signature: str, options: Opened
) -> str:
    """The exported functions of the model ``name``."""
    gpu = options.gpu
    told = (
        FAILURE
        + open_text(name, constants, weights, options)
        + _closed(name, constants)
        + _told(name, constants, functions, signature)
    )
    return told + calls_text(name, constants, words, gpu) + (_stream(name, constants) if gpu else "")


def _stream(name: str, constants: Constants) -> str:
    t = constants.text
    return f"""
define i32 @{name}_stream(ptr %context, ptr %stream) {{
entry:
  %text = call ptr @llvm.threadlocal.address.p0(ptr @failure)
  %none = icmp eq ptr %context, null
  br i1 %none, label %nothing, label %claim
nothing:
  %a = {SAY} {t("stream: the context may not be a null pointer")})
  ret i32 {CODES["argument"]}
claim:
  %busy.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 1
  %swap = cmpxchg ptr %busy.at, i32 0, i32 1 acquire monotonic
  %free = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %free, label %give, label %busy
busy:
  %b = {SAY} {t("stream: this context is in a call")})
  ret i32 {CODES["argument"]}
give:
  %message = getelementptr inbounds %Context, ptr %context, i32 0, i32 7
  store i8 0, ptr %message
  %code = call i32 @give_stream(ptr %message, ptr %context, ptr %stream)
  store atomic i32 0, ptr %busy.at release, align 4
  ret i32 %code
}}
"""


def _closed(name: str, constants: Constants) -> str:
    t = constants.text
    return f"""
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
  %code = call i32 @make_context(ptr %text, ptr %model, ptr %result)
  ret i32 %code
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
