"""Contexts of a model on a GPU, in LLVM IR: scratch and state in the GPU's memory, and the stream that calls go to.

A context has a stream of its own, for which a call waits before it returns, until the caller gives another. Then calls
are put there in their order, and nobody waits.
"""

from __future__ import annotations

from ..codes import CODES, SAY
from ..constants import Constants
from ..contexts import ARENA, ARENA_BYTES, MEMORY, MODEL, PLACES, WORDS
from ..routine import Routine
from .device import CONTEXT, NUMBER, POOLS
from .driver import driven, driven_anyway, refused

# Fields of a context behind those that every library has.
STREAM, OWN_STREAM = 10, 11
FIELDS = ", ptr, ptr"
"""What a context of a GPU has more: the stream that calls go to, and its own."""

THREADS = """
; the number of the GPU that tensors have to be on
@device_number = internal thread_local global i32 0
"""


def contexts_text(constants: Constants, weights: int, mutable_bytes: int, words: int) -> str:
    """``@make_context``, ``@free_context``, ``@grow_arena``, ``@enter``, ``@leave``, ``@give_stream``."""
    return "".join((
        THREADS,
        _make(constants, weights, mutable_bytes, words), _copy_state(constants, weights), _free(),
        _grow(constants), _enter(constants), _leave(constants), _give(constants), _turn(),
    ))  # fmt: skip


def _device(r: Routine, context: str = "%context") -> str:
    model = r.load("ptr", "%Context", context, MODEL)
    return r.load("ptr", "%Model", model, 4)


def _make(constants: Constants, weights: int, mutable_bytes: int, words: int) -> str:
    t, r = constants.text, Routine()
    r.line("store ptr null, ptr %result")
    context = r.value("call ptr @calloc(i64 1, i64 ptrtoint (ptr getelementptr (%Context, ptr null, i32 1) to i64))")
    with r.when(r.value(f"icmp eq ptr {context}, null"), "nothing"):
        r.value(f"{SAY} {t('context: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    r.store("ptr", "%model", "%Context", context, MODEL)
    places = r.value(f"call ptr @calloc(i64 {max(weights, 1)}, i64 8)")
    r.store("ptr", places, "%Context", context, PLACES)
    room = r.value(f"call ptr @calloc(i64 {max(words, 1)}, i64 8)")
    r.store("ptr", room, "%Context", context, WORDS)
    lacks = [r.value(f"icmp eq ptr {p}, null") for p in (places, room)]
    with r.when(r.value(f"or i1 {lacks[0]}, {lacks[1]}"), "no.memory"):
        r.line(f"call void @free_context(ptr {context})")
        r.value(f"{SAY} {t('context: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    device = r.load("ptr", "%Model", "%model", 4)
    place = r.value("alloca ptr")
    gpu = r.load("ptr", "%Device", device, CONTEXT)
    driven(r, constants, "cuCtxPushCurrent_v2", gpu)
    code = r.value(f"call i32 @fill_context(ptr %text, ptr {context}, ptr {places})")
    driven(r, constants, "cuCtxPopCurrent_v2", place)
    with r.when(r.value(f"icmp ne i32 {code}, 0"), "not.filled"):
        r.line(f"call void @free_context(ptr {context})")
        r.line(f"ret i32 {code}")
    holders = r.at("%Model", "%model", 2)
    r.value(f"atomicrmw add ptr {holders}, i32 1 monotonic")
    r.line(f"store ptr {context}, ptr %result")
    r.line("ret i32 0")
    what, status = r.failed()
    r.line(f"call void @free_context(ptr {context})")
    refused(r, t("context"), what, status)
    made = r.text("\n; A context of a model: a code, with a sentence where it is not zero.\n"
                  "define internal i32 @make_context(ptr %text, ptr %model, ptr %result)")  # fmt: skip
    return made + _filled(constants, mutable_bytes)


def _filled(constants: Constants, mutable_bytes: int) -> str:
    """The stream of a context, and its state, while the GPU's context is current."""
    t, r = constants.text, Routine()
    place = r.value("alloca i64")
    driven(r, constants, "cuStreamCreate", place, "1")  # it does not wait for the default stream
    stream = r.value(f"load ptr, ptr {place}")
    r.store("ptr", stream, "%Context", "%context", STREAM)
    r.store("ptr", stream, "%Context", "%context", OWN_STREAM)
    if mutable_bytes:
        driven(r, constants, "cuMemAlloc_v2", place, str(mutable_bytes))
        r.store("i64", r.value(f"load i64, ptr {place}"), "%Context", "%context", MEMORY)
    code = r.value("call i32 @copy_state(ptr %text, ptr %context, ptr %places)")
    r.line(f"ret i32 {code}")
    what, status = r.failed()
    refused(r, t("context"), what, status)
    return r.text("\ndefine internal i32 @fill_context(ptr %text, ptr %context, ptr %places)")


def _copy_state(constants: Constants, weights: int) -> str:
    t, r = constants.text, Routine()
    model = r.load("ptr", "%Context", "%context", MODEL)
    shared = r.load("ptr", "%Model", model, 1)
    memory = r.load("i64", "%Context", "%context", MEMORY)
    stream = r.load("ptr", "%Context", "%context", STREAM)
    with r.each(weights, "weight") as k:
        source = r.load("i64", "i64", shared, k)
        r.store("i64", source, "i64", "%places", k)
        row = r.item("%Weight", "@weights", k)
        home = r.load("i64", "%Weight", row, 2)
        with r.when(r.value(f"icmp sge i64 {home}, 0"), "state"):
            own = r.value(f"add i64 {memory}, {home}")
            r.store("i64", own, "i64", "%places", k)
            nbytes = r.load("i64", "%Weight", row, 1)
            with r.when(r.value(f"icmp ne i64 {nbytes}, 0"), "some"):
                driven(r, constants, "cuMemcpyDtoDAsync_v2", own, source, nbytes, stream)
    driven(r, constants, "cuStreamSynchronize", stream)
    r.line("ret i32 0")
    what, status = r.failed()
    refused(r, t("context"), what, status)
    return r.text("\n; The addresses of weights for a context, and copies of those that calls write to.\n"
                  "define internal i32 @copy_state(ptr %text, ptr %context, ptr %places)")  # fmt: skip


def _free() -> str:
    r = Routine()
    device = _device(r)
    gpu = r.load("ptr", "%Device", device, CONTEXT)
    place = r.value("alloca ptr")
    pushed = driven_anyway(r, "cuCtxPushCurrent_v2", gpu)
    r.note("what was put on a stream may be at work in the memory")
    driven_anyway(r, "cuCtxSynchronize")
    own = r.load("ptr", "%Context", "%context", OWN_STREAM)
    arena = r.load("i64", "%Context", "%context", ARENA)
    with r.when(r.value(f"icmp ne i64 {arena}, 0"), "arena"):
        r.value(f"call i32 @let_go(ptr {device}, i64 {arena}, ptr {own})")
    memory = r.load("i64", "%Context", "%context", MEMORY)
    with r.when(r.value(f"icmp ne i64 {memory}, 0"), "memory"):
        driven_anyway(r, "cuMemFree_v2", memory)
    with r.when(r.value(f"icmp ne ptr {own}, null"), "stream"):
        driven_anyway(r, "cuStreamDestroy_v2", own)
    with r.when(r.value(f"icmp eq i32 {pushed}, 0"), "pushed"):
        driven_anyway(r, "cuCtxPopCurrent_v2", place)
    for field in (PLACES, WORDS):
        r.line(f"call void @free(ptr {r.load('ptr', '%Context', '%context', field)})")
    r.line("call void @free(ptr %context)")
    r.line("ret void")
    freed = r.text("\ndefine internal void @free_context(ptr %context)")
    r = Routine()
    ordered = r.value(f"icmp ne i32 {r.load('i32', '%Device', '%device', POOLS)}, 0")
    with r.when(ordered, "ordered"):
        r.line(f"ret i32 {driven_anyway(r, 'cuMemFreeAsync', '%memory', '%stream')}")
    r.line(f"ret i32 {driven_anyway(r, 'cuMemFree_v2', '%memory')}")
    return freed + r.text("\n; Let go of memory once what is on a stream is done.\n"
                          "define internal i32 @let_go(ptr %device, i64 %memory, ptr %stream)")  # fmt: skip


def _grow(constants: Constants) -> str:
    t, r = constants.text, Routine()
    nbytes = r.load("i64", "%Context", "%context", ARENA_BYTES)
    with r.when(r.value(f"icmp sle i64 %needed, {nbytes}"), "enough"):
        r.line("ret i32 0")
    name = r.value("load ptr, ptr %f")
    device = _device(r)
    stream = r.load("ptr", "%Context", "%context", STREAM)
    old = r.load("i64", "%Context", "%context", ARENA)
    r.store("i64", 0, "%Context", "%context", ARENA)
    r.store("i64", 0, "%Context", "%context", ARENA_BYTES)
    with r.when(r.value(f"icmp ne i64 {old}, 0"), "old"):
        r.tried(t("cuMemFree"), f"call i32 @let_go(ptr {device}, i64 {old}, ptr {stream})")
    place = r.value("alloca i64")
    ordered = r.value(f"icmp ne i32 {r.load('i32', '%Device', device, POOLS)}, 0")
    with r.when(ordered, "ordered"):
        driven(r, constants, "cuMemAllocAsync", place, "%needed", stream)
    with r.when(r.value(f"xor i1 {ordered}, true"), "plain"):
        driven(r, constants, "cuMemAlloc_v2", place, "%needed")
    r.store("i64", r.value(f"load i64, ptr {place}"), "%Context", "%context", ARENA)
    r.store("i64", "%needed", "%Context", "%context", ARENA_BYTES)
    r.line("ret i32 0")
    what, status = r.failed()
    full = r.value(f"icmp eq i32 {status}, 2")
    with r.when(full, "full"):
        r.value(f"{SAY} {t('%s: a call with these sizes needs %lld bytes of scratch, and the GPU has not so many')}, "
                f"ptr {name}, i64 %needed)")  # fmt: skip
        r.line(f"ret i32 {CODES['memory']}")
    refused(r, name, what, status)
    return r.text("\n; Make the arena of a context large enough.\n"
                  "define internal i32 @grow_arena(ptr %text, ptr %f, ptr %context, i64 %needed)")  # fmt: skip


def _enter(constants: Constants) -> str:
    r = Routine()
    name = r.value("load ptr, ptr %f")
    gpu = r.load("ptr", "%Device", _device(r), CONTEXT)
    driven(r, constants, "cuCtxPushCurrent_v2", gpu)
    r.line("ret i32 0")
    what, status = r.failed()
    refused(r, name, what, status)
    return r.text("\n; Begin a call.\n"
                  "define internal i32 @enter(ptr %text, ptr %f, ptr %context)")  # fmt: skip


def _leave(constants: Constants) -> str:
    r = Routine()
    name = r.value("load ptr, ptr %f")
    place = r.value("alloca ptr")
    stream, mine = (r.load("ptr", "%Context", "%context", f) for f in (STREAM, OWN_STREAM))
    is_mine = r.value(f"icmp eq ptr {stream}, {mine}")
    waited = r.value("alloca i32")
    r.line(f"store i32 0, ptr {waited}")
    with r.when(is_mine, "wait"):
        r.line(f"store i32 {driven_anyway(r, 'cuStreamSynchronize', stream)}, ptr {waited}")
    popped = driven_anyway(r, "cuCtxPopCurrent_v2", place)
    with r.when(r.value("icmp ne i32 %code, 0"), "failed.before"):
        r.line("ret i32 %code")
    waiting = r.value(f"load i32, ptr {waited}")
    for what, status in (("cuStreamSynchronize", waiting), ("cuCtxPopCurrent_v2", popped)):
        with r.when(r.value(f"icmp ne i32 {status}, 0"), "wrong"):
            told = constants.text(what)
            code = r.value(f"call i32 @driver_failed(ptr %text, ptr {name}, ptr {told}, i32 {status})")
            r.line(f"ret i32 {code}")
    r.line("ret i32 0")
    return r.text("\n; End a call that gave a code; its own stream is waited for, whose kernels may have failed.\n"
                  "define internal i32 @leave(ptr %text, ptr %f, ptr %context, i32 %code)")  # fmt: skip


def _give(constants: Constants) -> str:
    """Another stream: what the one before was given is done first, for both use the same memory."""
    t, r = constants.text, Routine()
    device = _device(r)
    before = r.load("ptr", "%Context", "%context", STREAM)
    with r.when(r.value(f"icmp eq ptr {before}, %stream"), "same"):
        r.line("ret i32 0")
    place = r.value("alloca ptr")
    driven(r, constants, "cuCtxPushCurrent_v2", r.load("ptr", "%Device", device, CONTEXT))
    done = driven_anyway(r, "cuCtxSynchronize")
    driven(r, constants, "cuCtxPopCurrent_v2", place)
    r.tried(t("cuCtxSynchronize"), f"add i32 {done}, 0")
    r.store("ptr", "%stream", "%Context", "%context", STREAM)
    r.line("ret i32 0")
    what, status = r.failed()
    refused(r, t("stream"), what, status)
    return r.text("\n; Let calls of a context go to another stream.\n"
                  "define internal i32 @give_stream(ptr %text, ptr %context, ptr %stream)")  # fmt: skip


def _turn() -> str:
    r = Routine()
    number = r.load("i32", "%Device", r.load("ptr", "%Model", "%model", 4), NUMBER)
    own = r.value("call ptr @llvm.threadlocal.address.p0(ptr @device_number)")
    r.line(f"store i32 {number}, ptr {own}")
    r.line("ret void")
    return r.text("\n; From here on this thread looks at tensors for a model.\n"
                  "define internal void @look_for(ptr %model)")  # fmt: skip
