"""How a model is opened, in LLVM IR: what the caller asks for, weights, libraries, and the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .codes import CODES, MESSAGE_BYTES, SAY
from .constants import Constants
from .routine import Routine

FAILURE = f"""
@failure = internal thread_local global [{MESSAGE_BYTES} x i8] zeroinitializer
"""
TYPES = """
; bytes, threads, the host's function for rounds and its data; GPU, whether data are compared, library of products, its
; functions for float32 and float64
%Options = type { i32, i32, ptr, ptr, i32, i32, ptr, ptr, ptr }
"""
OPTION_BYTES = (24, 56)
"""What the first field of options may say: older callers know fewer."""
# Fields of a model.
_MAPPED, _PLACES, _HOLDERS, _TEAM = range(4)
_MOST_THREADS = 1 << 16


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening a model has to see to: a GPU, a hash of the data of its weights, the products of a library."""

    gpu: bool = False
    data_hash: bool = False
    products: Sequence[str] = ()


def open_text(name: str, constants: Constants, weights: int, what: Opened) -> str:
    """``NAME_open``, and ``@open_model``, which leaves nothing behind where it fails."""
    return _open(name, constants) + _open_model(constants, weights, what)


def _open(name: str, constants: Constants) -> str:
    """The arguments, as structure of the longest kind."""
    t, r = constants.text, Routine()
    text = r.value("call ptr @llvm.threadlocal.address.p0(ptr @failure)")
    r.line(f"store i8 0, ptr {text}")
    say = SAY.replace("%text", text)
    missing = [r.value(f"icmp eq ptr {p}, null") for p in ("%folder", "%result")]
    with r.when(r.value(f"or i1 {missing[0]}, {missing[1]}"), "nothing"):
        r.value(f"{say} {t('open: the folder and the place for the model may not be null pointers')})")
        r.line(f"ret i32 {CODES['argument']}")
    r.line("store ptr null, ptr %result")
    known = r.value("alloca %Options")
    r.line(f"store %Options zeroinitializer, ptr {known}")
    with r.when(r.value("icmp ne ptr %options, null"), "given"):
        nbytes = r.value("load i32, ptr %options")
        fits = [r.value(f"icmp eq i32 {nbytes}, {n}") for n in OPTION_BYTES]
        with r.when(r.value(f"xor i1 {r.value(f'or i1 {fits[0]}, {fits[1]}')}, true"), "foreign"):
            told = t("open: the options have %u bytes by their first field; this library knows options of %u and %u")
            r.value(f"{say} {told}, i32 {nbytes}, i32 {OPTION_BYTES[0]}, i32 {OPTION_BYTES[1]})")
            r.line(f"ret i32 {CODES['argument']}")
        wide = r.value(f"zext i32 {nbytes} to i64")
        r.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {known}, ptr %options, i64 {wide}, i1 false)")
    threads = r.load("i32", "%Options", known, 1)
    with r.when(r.value(f"icmp ugt i32 {threads}, {_MOST_THREADS}"), "uncounted"):
        told = t("open: %d threads are asked for; it has to be 0 (as many as there are processors) to 65536")
        r.value(f"{say} {told}, i32 {threads})")
        r.line(f"ret i32 {CODES['argument']}")
    lacks = r.value("call ptr @choose()")
    with r.when(r.value(f"icmp ne ptr {lacks}, null"), "unable"):
        least = r.load("ptr", "%Variant", "@least", 3)
        told = t("open: this processor lacks %s; the library needs at least %s")
        r.value(f"{say} {told}, ptr {lacks}, ptr {least})")
        r.line(f"ret i32 {CODES['processor']}")
    model = r.value("call ptr @calloc(i64 1, i64 ptrtoint (ptr getelementptr (%Model, ptr null, i32 1) to i64))")
    with r.when(r.value(f"icmp eq ptr {model}, null"), "no.memory"):
        r.value(f"{say} {t('open: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    r.store("i32", 1, "%Model", model, _HOLDERS)
    code = r.value(f"call i32 @open_model(ptr {text}, ptr {model}, ptr %folder, ptr {known})")
    with r.when(r.value(f"icmp ne i32 {code}, 0"), "failed.to"):
        r.line(f"call void @drop_model(ptr {model})")
        r.line(f"ret i32 {code}")
    r.line(f"store ptr {model}, ptr %result")
    r.line("ret i32 0")
    return "\n" + r.text(f"define i32 @{name}_open(ptr %folder, ptr %options, ptr %result)")


def _open_model(constants: Constants, weights: int, what: Opened) -> str:
    t, r = constants.text, Routine()
    team = r.at("%Model", "%model", _TEAM)
    threads, host, passed = (
        r.load(kind, "%Options", "%options", f) for f, kind in ((1, "i32"), (2, "ptr"), (3, "ptr"))
    )
    seated = r.value(f"call i1 @team_init(ptr {team}, i32 {threads}, ptr {host}, ptr {passed})")
    places = r.value(f"call ptr @calloc(i64 {max(weights, 1)}, i64 8)")
    r.store("ptr", places, "%Model", "%model", _PLACES)
    none = r.value(f"icmp eq ptr {places}, null")
    standing = r.value(f"xor i1 {seated}, true")
    with r.when(r.value(f"or i1 {none}, {standing}"), "no.memory"):
        r.value(f"{SAY} {t('open: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    mapped = r.value("call ptr @map_weights(ptr %text, ptr %folder)")
    with r.when(r.value(f"icmp eq ptr {mapped}, null"), "no.file"):
        r.line(f"ret i32 {CODES['file']}")
    r.store("ptr", mapped, "%Model", "%model", _MAPPED)
    verify = r.load("i32", "%Options", "%options", 5)
    with r.when(r.value(f"icmp ne i32 {verify}, 0"), "verify"):
        if not what.data_hash:
            r.value(
                f"{SAY} {t('open: the data of weights are to be compared, and this library holds no hash of them')})"
            )
            r.line(f"ret i32 {CODES['argument']}")
        else:
            same = r.value(f"call i1 @compare_data(ptr {mapped})")
            with r.when(r.value(f"xor i1 {same}, true"), "other"):
                told = t("open: the data of %s/model.safetensors are not those that the model was exported with: they "
                         "are damaged, or of another checkpoint")  # fmt: skip
                r.value(f"{SAY} {told}, ptr %folder)")
                r.line(f"ret i32 {CODES['file']}")
    for step, wanted in (("find_products", bool(what.products)), ("begin_device", what.gpu)):
        if wanted:
            code = r.value(f"call i32 @{step}(ptr %text, ptr %model, ptr %options)")
            with r.when(r.value(f"icmp ne i32 {code}, 0"), step):
                r.line(f"ret i32 {code}")
    if not what.gpu:
        r.line(f"call void @point_to_weights(ptr {mapped}, ptr {places})")
    r.line("ret i32 0")
    return "\n" + r.text(
        "; Fill a model. Where this fails, @drop_model lets go of what is there.\n"
        "define internal i32 @open_model(ptr %text, ptr %model, ptr %folder, ptr %options)"
    )
