"""The settings of one compilation: one table of fields, read once.

`torch.compile(options=…)` goes over `MLC_*` variables, and those over defaults. A name or a value that does not
exist is an `OptionError` that names the nearest one that does.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from platformdirs import user_cache_dir

from ..ir.errors import MlcError
from ..scheduler.overrides import OverrideError, Overrides, load_overrides
from .cache import DEFAULT_LIMIT

LOG_TOPICS = ("timing", "cache", "fusion", "schedule")
HOST_PROGRAMS = ("python", "native", "auto")
MODES: dict[str, dict[str, object]] = {
    "default": {},
    "max-autotune": {"tune": True},
    "max-autotune-no-cudagraphs": {"tune": True},
    "reduce-overhead": {"cuda_graphs": True},
}


class OptionError(MlcError, ValueError):
    """A setting that does not exist, or a value that it cannot have. The message names the nearest right one."""


class _Refused(Exception):
    """A parser's no; `Options.resolve` adds where the value came from. `wrong` is the part that was not understood."""

    def __init__(self, valid: str, known: tuple[str, ...] = (), wrong: str = "") -> None:
        super().__init__(valid)
        self.valid, self.known, self.wrong = valid, known, wrong


def _parse_bool(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    text = str(value).strip().lower()
    if text in words:
        return words[text]
    raise _Refused("0 or 1 (also false/true, no/yes, off/on)", tuple(words), text)


def _parse_seconds(value: object) -> float:
    valid = "a duration above zero: 60s, 2m, 500ms, 1h, or a number of seconds"
    units = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)", str(value).strip().lower())
    if isinstance(value, bool) or found is None:
        raise _Refused(valid)
    seconds = float(found[1]) * units[found[2]]
    if seconds <= 0 or not isfinite(seconds):
        raise _Refused(valid)
    return seconds


def _parse_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip():
        raise _Refused("the path of a folder")
    return Path(value).expanduser().absolute()


def _parse_cache_dir(value: object) -> Path:
    path = _parse_path(value)
    if path is None:
        raise _Refused("the path of a folder")
    return path


def _parse_size(value: object) -> int:
    valid = "a size above zero: 512MiB, 4GiB, 2GB, or a number of bytes"
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kmg]?i?b|)", str(value).strip().lower())
    if isinstance(value, bool) or found is None or found[2] not in units:
        raise _Refused(valid)
    size = int(float(found[1]) * units[found[2]])
    if size <= 0:
        raise _Refused(valid)
    return size


def _parse_limit(value: object) -> int | None:
    return None if value is None else _parse_size(value)


def _parse_remote(value: object) -> str | None:
    if value is None:
        return None
    url = str(value).strip()
    scheme, mark, rest = url.partition("://")
    known = tuple(sorted(fsspec.available_protocols()))
    if not mark or not rest or scheme not in known:
        raise _Refused("a URL that fsspec knows, such as s3://bucket/folder or file:///folder", known, scheme)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise _Refused(f"{url} once its library is installed ({error})") from None
    return url


def _parse_target(value: object) -> str | None:
    if value is None:
        return None
    text = str(value).strip().lower()
    if text == "cpu" or re.fullmatch(r"cuda:sm_\d{2,3}a?|hip:gfx[0-9a-f]{3,4}", text):
        return text
    known = ("cpu", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx90a", "hip:gfx942", "hip:gfx950")
    raise _Refused("cpu, cuda:sm_<NN> such as cuda:sm_90, or hip:gfx<NNN> such as hip:gfx942", known, text)


def _parse_verify(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or text not in ("0", "1", "2"):
        raise _Refused("0, 1 or 2")
    return int(text)


def _parse_log(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        raise _Refused(f"a comma list of {', '.join(LOG_TOPICS)}")
    topics = {str(part).strip().lower() for part in parts} - {""}
    for topic in sorted(topics - set(LOG_TOPICS)):
        raise _Refused(f"a comma list of {', '.join(LOG_TOPICS)}", LOG_TOPICS, topic)
    return tuple(topic for topic in LOG_TOPICS if topic in topics)


def _parse_numerics(value: object) -> str:
    text = str(value).strip().lower()
    if text not in ("fast", "eager"):
        raise _Refused("fast or eager", ("fast", "eager"), text)
    return text


def _parse_host_program(value: object) -> str:
    text = str(value).strip().lower()
    if text not in HOST_PROGRAMS:
        raise _Refused(", ".join(HOST_PROGRAMS), HOST_PROGRAMS, text)
    return text


def _parse_threads(value: object) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,5}", text) or int(text) < 1:
        raise _Refused("a whole number of threads, 1 or more")
    return int(text)


def _parse_count(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,5}", text) or int(text) < 1:
        raise _Refused("a whole number, 1 or more")
    return int(text)


def _parse_loss_chunk(value: object) -> int | None:
    if value is None or str(value).strip().lower() == "auto":
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", text):
        raise _Refused("a whole number of rows, 0 for never, or auto", ("auto",), text.lower())
    return int(text)


def _parse_schedules(value: object) -> Overrides | None:
    if value is None:
        return None
    try:
        return load_overrides(value)
    except OverrideError as error:
        raise OptionError(f"schedules (MLC_SCHEDULES): {error}") from error


class OptionSpec(NamedTuple):
    """One row of the table. `shown_default` and `doc` are what the documentation prints."""

    name: str
    variable: str
    parse: Callable[[object], Any]
    values: str
    shown_default: str
    doc: str
    changes_code: bool


def _option(
    variable: str,
    parse: Callable[[object], Any],
    *,
    values: str,
    doc: str,
    shown: str,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    changes_code: bool = False,
) -> Any:
    metadata = {
        "variable": variable,
        "parse": parse,
        "values": values,
        "doc": doc,
        "shown": shown,
        "code": changes_code,
    }
    if default is MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one compilation. Times in seconds, paths absolute.

    The field's name is its key in `torch.compile(options=…)`; its `MLC_*` variable, parser and text are its metadata.
    """

    tune: bool = _option(
        "MLC_TUNE",
        _parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        changes_code=True,
        doc="Measure the schedules that each rule offers and keep the fastest in the tuning database.",
    )
    tune_budget: float = _option(
        "MLC_TUNE_BUDGET",
        _parse_seconds,
        default=60.0,
        shown="60s",
        values="500ms, 60s, 2m, 1h",
        doc="The most time that tuning may take for one graph.",
    )
    cache_dir: Path = _option(
        "MLC_CACHE_DIR",
        _parse_cache_dir,
        default_factory=lambda: Path(user_cache_dir("torch_mlc")),
        shown="the user's cache folder, `torch_mlc`",
        values="a folder",
        doc="Where compiled graphs and tuning results are kept between processes.",
    )
    cache: bool = _option(
        "MLC_CACHE",
        _parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        doc="Read and write compiled graphs on disk.",
    )
    cache_size: int = _option(
        "MLC_CACHE_SIZE",
        _parse_size,
        default=DEFAULT_LIMIT,
        shown="4GiB",
        values="512MiB, 4GiB, …",
        doc="The most that the cache folder may hold; what was used longest ago goes first.",
    )
    cache_remote: str | None = _option(
        "MLC_CACHE_REMOTE",
        _parse_remote,
        default=None,
        shown="none",
        values="a URL for fsspec: s3://…, gs://…, file:///…",
        doc="A place that machines share, asked where the cache folder has nothing and given what is compiled. Who may "
        "write there can have code run here.",
    )
    target: str | None = _option(
        "MLC_TARGET",
        _parse_target,
        default=None,
        shown="from the tensors",
        values="cpu, cuda:sm_90, hip:gfx942, …",
        changes_code=True,
        doc="Compile for this machine; a GPU target needs no GPU to compile.",
    )
    dump_dir: Path | None = _option(
        "MLC_DUMP_DIR",
        _parse_path,
        default=None,
        shown="none",
        values="a folder",
        doc="Write the IR after every pass, the schedules and the emitted sources here, as numbered files.",
    )
    verify: int = _option(
        "MLC_VERIFY",
        _parse_verify,
        default=0,
        shown="0",
        values="0, 1, 2",
        changes_code=True,
        doc="1 checks the IR before and after each pass, and runs each kernel that is built on small awkward sizes "
        "against its definition; 2 also compares every run of a graph with its ATen ops.",
    )
    log: tuple[str, ...] = _option(
        "MLC_LOG",
        _parse_log,
        default=(),
        shown="none",
        values="a comma list of " + ", ".join(LOG_TOPICS),
        doc="Print what happened on these topics to standard error.",
    )
    numerics: str = _option(
        "MLC_NUMERICS",
        _parse_numerics,
        default="fast",
        shown="fast",
        values="fast, eager",
        changes_code=True,
        doc="fast keeps float32 inside a fused kernel of half types; eager rounds wherever eager does.",
    )
    threads: int | None = _option(
        "MLC_THREADS",
        _parse_threads,
        default=None,
        shown="torch.get_num_threads()",
        values="1, 2, …",
        changes_code=True,
        doc="Threads that a CPU kernel may use.",
    )
    strict: bool = _option(
        "MLC_STRICT",
        _parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        changes_code=True,
        doc="Fail where a kernel does not compile, instead of running its ATen ops with a warning.",
    )
    fallback_random: bool = _option(
        "MLC_FALLBACK_RANDOM",
        _parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        changes_code=True,
        doc="Draw random numbers by eager's own kernels, so that a seed gives eager's numbers.",
    )
    loss_chunk: int | None = _option(
        "MLC_LOSS_CHUNK",
        _parse_loss_chunk,
        default=None,
        shown="auto",
        values="auto, 0, 1024, …",
        changes_code=True,
        doc="Rows of logits that exist at a time in linear + cross-entropy; auto chunks logits above 64 MiB (1 GiB on "
        "GPUs), 0 none.",
    )
    host_program: str = _option(
        "MLC_HOST_PROGRAM",
        _parse_host_program,
        default="auto",
        shown="auto",
        values=", ".join(HOST_PROGRAMS),
        doc="What runs between the kernels of a graph on the CPU: Python, or machine code that has no Python between "
        "them; auto is Python until a graph has been called 64 times, and then native where it can be.",
    )
    cuda_graphs: bool = _option(
        "MLC_CUDA_GRAPHS",
        _parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        doc="Capture what a graph launches on a GPU, and replay it: from the third call for the same sizes on.",
    )
    cuda_graph_shapes: int = _option(
        "MLC_CUDA_GRAPH_SHAPES",
        _parse_count,
        default=16,
        shown="16",
        values="1, 2, …",
        doc="Captures of one graph, for different sizes or parameters; calls beyond them run as without.",
    )
    cuda_graph_copies: bool = _option(
        "MLC_CUDA_GRAPH_COPIES",
        _parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        doc="Copy results out of the memory of a captured graph; 0 hands that memory out, and captures the graph again "
        "where it is called before the results are gone.",
    )
    memory_limit: int | None = _option(
        "MLC_MEMORY_LIMIT",
        _parse_limit,
        default=None,
        shown="none",
        values="512MiB, 8GiB, …",
        changes_code=True,
        doc="The most that one graph may hold beyond parameters and the caller's inputs. In training more is computed "
        "again to stay below it; a graph that still would not is refused, with what it holds.",
    )
    schedules: Overrides | None = _option(
        "MLC_SCHEDULES",
        _parse_schedules,
        default=None,
        shown="none",
        values="a script (.py) or traces (.json); as an option also a mapping",
        doc="Schedules by hand for kernels, by the hash of their workload (docs/scheduling.md).",
    )

    @classmethod
    def resolve(cls, mode: str | None, options: Mapping[str, object] | None, environ: Mapping[str, str]) -> "Options":
        """Read the settings: `options` and `mode` (of torch.compile) over `MLC_*` in `environ` over defaults.

        Raises: OptionError for a mode, key, variable or value that does not exist.
        """
        specs = {spec.name: spec for spec in option_specs()}
        variables = {spec.variable: spec for spec in specs.values()}
        values: dict[str, Any] = {}
        for variable in sorted(name for name in environ if name.startswith("MLC_")):
            if variable not in variables:
                raise _unknown("environment variable", variable, tuple(variables), "unset it, or correct its name")
            if environ[variable].strip():
                spec = variables[variable]
                values[spec.name] = _parsed(spec, environ[variable], f"{variable}={environ[variable]}")
        values |= _of_mode(mode)
        for key, value in (options or {}).items():
            if key not in specs:
                raise _unknown("option", str(key), tuple(specs), 'correct the key in torch.compile(options={"…": …})')
            values[key] = _parsed(specs[key], value, f"options={{{key!r}: {value!r}}}")
        return cls(**values)

    def fingerprint(self) -> str:
        """The settings that change what is compiled or checked, as stable text for a cache key."""
        return ";".join(f"{spec.name}={getattr(self, spec.name)!r}" for spec in option_specs() if spec.changes_code)


def option_specs() -> tuple[OptionSpec, ...]:
    """Every setting, in the order of the documentation."""
    return tuple(map(_spec, fields(Options)))


def _spec(row: Field[Any]) -> OptionSpec:
    meta = row.metadata
    return OptionSpec(
        row.name, meta["variable"], meta["parse"], meta["values"], meta["shown"], meta["doc"], meta["code"]
    )


def _of_mode(mode: str | None) -> Mapping[str, object]:
    if mode is None:
        return {}
    if mode not in MODES:
        raise _unknown("mode", str(mode), tuple(MODES), 'correct torch.compile(mode="…")')
    return MODES[mode]


def _parsed(spec: OptionSpec, value: object, asked: str) -> Any:
    try:
        return spec.parse(value)
    except _Refused as no:
        near = get_close_matches(no.wrong, no.known, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(
            f"{asked}: {spec.name} ({spec.variable}) cannot be {no.wrong or str(value)!r}.{guess} Valid: {no.valid}."
        ) from None


def _unknown(what: str, name: str, known: tuple[str, ...], mend: str) -> OptionError:
    near = get_close_matches(name, known, n=1, cutoff=0.0)
    return OptionError(
        f"torch-mlc has no {what} {name!r}. Did you mean {near[0]!r}? Valid: {', '.join(known)}. To mend: {mend}."
    )


def options_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    rows = ["| `options=` key | variable | values | default | what it does |", "|---|---|---|---|---|"]
    for spec in option_specs():
        rows.append(f"| `{spec.name}` | `{spec.variable}` | {spec.values} | {spec.shown_default} | {spec.doc} |")
    return "\n".join(rows) + "\n"


def options_markdown() -> str:
    """The page docs/options.md."""
    return f"""# Settings

Made by `python -m torch_mlc options --markdown` from `runtime/options.py`; do not edit.

`torch.compile(model, backend="mlc", options={{…}})` goes over the `MLC_*` variables, and those over the defaults.
All are read once, when a graph is compiled. A wrong name or value is an error that names the nearest right one.

{options_table()}
`mode="max-autotune"` and `mode="max-autotune-no-cudagraphs"` set `tune`, `mode="reduce-overhead"` sets `cuda_graphs`.
"""
