"""What a setting may be: one parser each, from text of the environment or a value of `torch.compile(options=…)`.

Each raises `ValueRefused` with what is valid, where the value is not; who asked for it is added by `Options.resolve`.
"""

import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

import fsspec

from ...ir.errors import MlcError
from ...scheduler.decisions import DecisionOverrides, parse_overrides
from ...scheduler.numerics import EAGER, FAST, Numerics, NumericsByPlace, NumericsError, parse_places
from ...scheduler.regions.choose import Cuts
from ...scheduler.schedule.overrides import OverrideError, Overrides, load_overrides

LOG_TOPICS = ("timing", "cache", "fusion", "schedule")
# Besides 0 and 1.
TUNE_MODES = ("model", "replay")
TUNE_NUMERICS = ("any", "same")
HOST_PROGRAMS = ("python", "native", "auto")
LOCK_MODES = ("check", "write", "use")


class OptionError(MlcError, ValueError):
    """A setting that does not exist, or a value that it cannot have. The message names the nearest right one."""


class ValueRefused(Exception):
    """A parser's no; `Options.resolve` adds where the value came from. `wrong` is the part that was not understood."""

    def __init__(self, valid: str, known: tuple[str, ...] = (), wrong: str = "") -> None:
        super().__init__(valid)
        self.valid, self.known, self.wrong = valid, known, wrong


def parse_bool(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    text = str(value).strip().lower()
    if text in words:
        return words[text]
    raise ValueRefused("0 or 1 (also false/true, no/yes, off/on)", tuple(words), text)


def parse_tune(value: object) -> bool | str:
    text = str(value).strip().lower()
    if text in TUNE_MODES:
        return text
    try:
        return parse_bool(value)
    except ValueRefused as error:
        known = (*error.known, *TUNE_MODES)
        raise ValueRefused("0, 1, model or replay (also false/true, no/yes, off/on)", known, text) from None


def parse_tune_numerics(value: object) -> str:
    text = str(value).strip().lower()
    if text in TUNE_NUMERICS:
        return text
    raise ValueRefused(" or ".join(TUNE_NUMERICS), TUNE_NUMERICS, text)


def parse_seconds(value: object) -> float:
    valid = "a duration above zero: 60s, 2m, 500ms, 1h, or a number of seconds"
    units = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)", str(value).strip().lower())
    if isinstance(value, bool) or found is None:
        raise ValueRefused(valid)
    seconds = float(found[1]) * units[found[2]]
    if seconds <= 0 or not isfinite(seconds):
        raise ValueRefused(valid)
    return seconds


def seconds_text(seconds: float) -> str:
    """A duration as ``parse_seconds`` takes it, in the largest unit that leaves a whole number: 90.0 is "90s"."""
    for unit, size in (("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 1e-3)):
        count = seconds / size
        if abs(count - round(count)) < 1e-6 and round(count) and (size <= 1 or count != 1 or unit == "h"):
            return f"{round(count)}{unit}"
    return f"{seconds:.12g}s"


def parse_workers(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise ValueRefused("a number of processes, 0 for none")
    return int(text)


def parse_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueRefused("the path of a folder")
    return Path(value).expanduser().absolute()


def parse_cache_dir(value: object) -> Path:
    path = parse_path(value)
    if path is None:
        raise ValueRefused("the path of a folder")
    return path


def parse_size(value: object) -> int:
    valid = "a size above zero: 512MiB, 4GiB, 2GB, or a number of bytes"
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kmg]?i?b|)", str(value).strip().lower())
    if isinstance(value, bool) or found is None or found[2] not in units:
        raise ValueRefused(valid)
    size = int(float(found[1]) * units[found[2]])
    if size <= 0:
        raise ValueRefused(valid)
    return size


def size_text(size: int) -> str:
    """A size as ``parse_size`` takes it, in the largest unit that leaves a whole number: 1 << 32 is "4GiB"."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return f"{size}B"


def parse_limit(value: object) -> int | None:
    return None if value is None else parse_size(value)


def parse_remote(value: object) -> str | None:
    if value is None:
        return None
    url = str(value).strip()
    scheme, mark, rest = url.partition("://")
    known = tuple(sorted(fsspec.available_protocols()))
    if not mark or not rest or scheme not in known:
        raise ValueRefused("a URL that fsspec knows, such as s3://bucket/folder or file:///folder", known, scheme)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ValueRefused(f"{url} once its library is installed ({error})") from None
    return url


def parse_target(value: object) -> str | None:
    if value is None:
        return None
    text = str(value).strip().lower()
    if text == "cpu" or re.fullmatch(r"cuda:sm_\d{2,3}[af]?|hip:gfx[0-9a-f]{3,4}", text):
        return text
    known = ("cpu", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx90a", "hip:gfx942", "hip:gfx950")
    raise ValueRefused("cpu, cuda:sm_<NN> such as cuda:sm_90, or hip:gfx<NNN> such as hip:gfx942", known, text)


def parse_verify(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or text not in ("0", "1", "2"):
        raise ValueRefused("0, 1 or 2")
    return int(text)


def parse_log(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        raise ValueRefused(f"a comma list of {', '.join(LOG_TOPICS)}")
    topics = {str(part).strip().lower() for part in parts} - {""}
    for topic in sorted(topics - set(LOG_TOPICS)):
        raise ValueRefused(f"a comma list of {', '.join(LOG_TOPICS)}", LOG_TOPICS, topic)
    return tuple(topic for topic in LOG_TOPICS if topic in topics)


def parse_numerics(value: object) -> Numerics:
    if isinstance(value, NumericsByPlace):
        return value
    text = str(value).strip().lower()
    if text in (FAST, EAGER):
        return text
    if not isinstance(value, Mapping) and not text.endswith(".json"):
        raise ValueRefused("fast, eager, a file (.json) or a mapping of places", (FAST, EAGER), text)
    try:
        given = value if isinstance(value, Mapping) else json.loads(Path(str(value)).read_text(encoding="utf-8"))
        if not isinstance(given, Mapping):
            raise NumericsError("a JSON object from places to fast or eager is wanted")
        return parse_places(given)
    except (OSError, ValueError) as error:
        raise OptionError(f"numerics (MLC_NUMERICS): {error}") from error


def parse_cpu_products(value: object) -> str:
    text = str(value).strip().lower()
    if text not in ("auto", "blas"):
        raise ValueRefused("auto or blas", ("auto", "blas"), text)
    return text


def parse_libraries(value: object) -> str:
    text = str(value).strip().lower()
    if text not in ("aten", "cblas", "none"):
        raise ValueRefused("aten, cblas or none", ("aten", "cblas", "none"), text)
    return text


def parse_host_program(value: object) -> str:
    text = str(value).strip().lower()
    if text not in HOST_PROGRAMS:
        raise ValueRefused(", ".join(HOST_PROGRAMS), HOST_PROGRAMS, text)
    return text


def parse_threads(value: object) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,5}", text) or int(text) < 1:
        raise ValueRefused("a whole number of threads, 1 or more")
    return int(text)


def parse_count(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,5}", text) or int(text) < 1:
        raise ValueRefused("a whole number, 1 or more")
    return int(text)


def parse_loss_chunk(value: object) -> int | None:
    if value is None or str(value).strip().lower() == "auto":
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", text):
        raise ValueRefused("a whole number of rows, 0 for never, or auto", ("auto",), text.lower())
    return int(text)


def parse_cpu_pool(value: object) -> int | None:
    text = str(value).strip().lower()
    if value is None or text == "auto":
        return None
    if text == "0" and not isinstance(value, bool):
        return 0
    try:
        return parse_size(value)
    except ValueRefused as refused:
        raise ValueRefused(f"auto, 0 for none, or {refused.valid}", ("auto",), text) from None


def parse_decisions(value: object) -> DecisionOverrides | None:
    if value is None or isinstance(value, DecisionOverrides):
        return value
    try:
        given = value if isinstance(value, Mapping) else json.loads(Path(str(value)).read_text(encoding="utf-8"))
        if not isinstance(given, Mapping):
            raise ValueRefused("a JSON object from kind:key to the name of a way")
        return parse_overrides(given)
    except (OSError, ValueError) as error:
        raise OptionError(f"decisions (MLC_DECISIONS): {error}") from error


def parse_schedules(value: object) -> Overrides | None:
    if value is None:
        return None
    try:
        return load_overrides(value)
    except OverrideError as error:
        raise OptionError(f"schedules (MLC_SCHEDULES): {error}") from error


def parse_regions(value: object) -> Cuts | str | int:
    if isinstance(value, Cuts):
        return value
    if value is None or value is True or str(value).strip().lower() in ("auto", ""):
        return "auto"
    if value is False or str(value).strip() == "0":
        return 0
    parts = [str(v) for v in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    alone, bounds, divisors = list[int](), list[int](), list[int]()
    for part in map(str.strip, parts):
        number = part.lstrip("=%") if part[:1] in "=%" else part
        if not number.isdecimal() or int(number) < 1 or len(part) - len(number) > 1:
            raise ValueRefused("auto, 0, or cuts: =1 (a size alone), 16 (a region begins), %8 (multiples)", wrong=part)
        {"=": alone, "%": divisors}.get(part[0], bounds).append(int(number))
    if len(divisors) > 1:
        raise ValueRefused("cuts with one divisor at most, as in =1,16,%8", wrong=str(value))
    return Cuts(tuple(sorted(set(bounds))), tuple(sorted(set(alone))), *divisors)


def parse_lock(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip() or Path(value).is_dir():
        raise ValueRefused("the path of a file, such as model.mlc.lock")
    return Path(value).expanduser().absolute()


def parse_lock_mode(value: object) -> str:
    text = str(value).strip().lower()
    if text not in LOCK_MODES:
        raise ValueRefused(", ".join(LOCK_MODES), LOCK_MODES, text)
    return text
