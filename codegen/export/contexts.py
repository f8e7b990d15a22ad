"""Contexts of a library, in LLVM IR: scratch, sentences, and copies of what calls write to; one for each thread."""

from __future__ import annotations

from .codes import CODES, MESSAGE_BYTES, SAY
from .constants import Constants
from .routine import Routine

MODEL, BUSY, ARENA, ARENA_BYTES, PLACES, MEMORY, WORDS, MESSAGE, SEED, DRAWN = range(10)
"""The fields of a context."""


def types_text(more: str = "") -> str:
    """The types of models and contexts; a context may have ``more`` fields (", ptr")."""
    return f"""
; the mapped file, addresses of weights, how many hold this model (itself and contexts), its threads, its GPU, products
; of float32 and float64
%Model = type {{ ptr, ptr, i32, %Team, ptr, ptr, ptr }}
; model, whether a call is running, arena, its bytes, addresses of weights, memory of those that calls write to, words
; for the checks, the sentence of the last failure, the seed of random numbers and how many were drawn
%Context = type {{ ptr, i32, ptr, i64, ptr, ptr, ptr, [{MESSAGE_BYTES} x i8], i64, i64{more} }}
"""


def contexts_text(constants: Constants, weights: int, mutable_bytes: int, words: int) -> str:
    """``@make_context``, ``@grow_arena`` and ``@free_context``."""
    t = constants.text
    return (
        _own_weights(weights)
        + f"""
; Memory of so many bytes at a multiple of 64; null where there is none.
define internal ptr @aligned_memory(i64 %bytes) {{
  %place = alloca ptr
  store ptr null, ptr %place
  %padded = add i64 %bytes, 63
  %whole = and i64 %padded, -64
  %some = call i64 @llvm.umax.i64(i64 %whole, i64 64)
  %status = call i32 @posix_memalign(ptr %place, i64 64, i64 %some)
  %fine = icmp eq i32 %status, 0
  %memory = load ptr, ptr %place
  %result = select i1 %fine, ptr %memory, ptr null
  ret ptr %result
}}

; A context of a model: a code, with a sentence where it is not zero.
define internal i32 @make_context(ptr %text, ptr %model, ptr %result) {{
entry:
  store ptr null, ptr %result
  %context = call ptr @calloc(i64 1, i64 ptrtoint (ptr getelementptr (%Context, ptr null, i32 1) to i64))
  %none = icmp eq ptr %context, null
  br i1 %none, label %nothing, label %parts
nothing:
  %a = {SAY} {t("context: the system has no memory left")})
  ret i32 {CODES["memory"]}
parts:
  store ptr %model, ptr %context
  %weights = call ptr @calloc(i64 {max(weights, 1)}, i64 8)
  %weights.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 4
  store ptr %weights, ptr %weights.at
  %memory = call ptr @aligned_memory(i64 {mutable_bytes})
  %memory.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 5
  store ptr %memory, ptr %memory.at
  %words = call ptr @calloc(i64 {max(words, 1)}, i64 8)
  %words.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 6
  store ptr %words, ptr %words.at
  %no.weights = icmp eq ptr %weights, null
  %no.memory = icmp eq ptr %memory, null
  %no.words = icmp eq ptr %words, null
  %no.a = or i1 %no.weights, %no.memory
  %lacks = or i1 %no.a, %no.words
  br i1 %lacks, label %undo, label %copy
undo:
  call void @free_context(ptr %context)
  br label %nothing
copy:
  call void @own_weights(ptr %model, ptr %weights, ptr %memory)
  %holders.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 2
  %h = atomicrmw add ptr %holders.at, i32 1 monotonic
  store ptr %context, ptr %result
  ret i32 0
}}

; Make the arena of a context large enough.
define internal i32 @grow_arena(ptr %text, ptr %f, ptr %context, i64 %needed) {{
  %arena.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 2
  %bytes.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 3
  %bytes = load i64, ptr %bytes.at
  %enough = icmp sle i64 %needed, %bytes
  br i1 %enough, label %done, label %grow
grow:
  %old = load ptr, ptr %arena.at
  call void @free(ptr %old)
  store ptr null, ptr %arena.at
  store i64 0, ptr %bytes.at
  %new = call ptr @aligned_memory(i64 %needed)
  %none = icmp eq ptr %new, null
  br i1 %none, label %refuse, label %keep
refuse:
  %f.name = load ptr, ptr %f
  %s = {SAY} {t("%s: a call with these sizes needs %lld bytes of scratch, and the system has not so many")},
      ptr %f.name, i64 %needed)
  ret i32 {CODES["memory"]}
keep:
  store ptr %new, ptr %arena.at
  store i64 %needed, ptr %bytes.at
  br label %done
done:
  ret i32 0
}}

define internal void @free_context(ptr %context) {{
  %arena.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 2
  %arena = load ptr, ptr %arena.at
  call void @free(ptr %arena)
  %weights.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 4
  %weights = load ptr, ptr %weights.at
  call void @free(ptr %weights)
  %memory.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 5
  %memory = load ptr, ptr %memory.at
  call void @free(ptr %memory)
  %words.at = getelementptr inbounds %Context, ptr %context, i32 0, i32 6
  %words = load ptr, ptr %words.at
  call void @free(ptr %words)
  call void @free(ptr %context)
  ret void
}}
"""
    )


def _own_weights(weights: int) -> str:
    r = Routine()
    shared = r.load("ptr", "%Model", "%model", 1)
    with r.each(weights, "weight") as k:
        source = r.load("ptr", "ptr", shared, k)
        r.store("ptr", source, "ptr", "%places", k)
        row = r.item("%Weight", "@weights", k)
        home = r.load("i64", "%Weight", row, 2)
        with r.when(r.value(f"icmp sge i64 {home}, 0"), "state"):
            own = r.value(f"getelementptr inbounds i8, ptr %memory, i64 {home}")
            nbytes = r.load("i64", "%Weight", row, 1)
            r.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {own}, ptr {source}, i64 {nbytes}, i1 false)")
            r.store("ptr", own, "ptr", "%places", k)
    r.line("ret void")
    return r.text(
        '\n; The addresses of the model\'s weights; those that calls write to are copied to "memory".\n'
        "define internal void @own_weights(ptr %model, ptr %places, ptr %memory)"
    )


def holders_text(gpu: bool) -> str:
    """``@drop_model``, of a model that has a GPU or none."""
    device = """
  %device.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 4
  %device = load ptr, ptr %device.at
  call void @end_device(ptr %device)"""
    return _DROP.replace("DEVICE", device.strip() if gpu else "; it has nothing else")


_DROP = """
; One holder of a model less; the last one ends it.
define internal void @drop_model(ptr %model) {
  %holders.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 2
  %before = atomicrmw sub ptr %holders.at, i32 1 acq_rel
  %last = icmp eq i32 %before, 1
  br i1 %last, label %end, label %done
end:
  %team = getelementptr inbounds %Model, ptr %model, i32 0, i32 3
  call void @team_end(ptr %team)
  DEVICE
  %mapped = load ptr, ptr %model
  call void @unmap_weights(ptr %mapped)
  %weights.at = getelementptr inbounds %Model, ptr %model, i32 0, i32 1
  %weights = load ptr, ptr %weights.at
  call void @free(ptr %weights)
  call void @free(ptr %model)
  br label %done
done:
  ret void
}
"""
