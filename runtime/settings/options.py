"""The settings of one compilation: one table of fields, read once.

`torch.compile(options=…)` goes over `TORCH_MLC_*` variables, those over `MLC_*`, and those over defaults. A name or a
value that does not exist is an `OptionError` that names the nearest one that does; variables of other projects that
begin with `MLC_` are left alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_dir

from ...scheduler.decisions import DecisionOverrides
from ...scheduler.numerics import Numerics
from ...scheduler.regions.choose import Cuts
from ...scheduler.schedule.overrides import Overrides
from ..cache.cache import DEFAULT_LIMIT
from ..log import asks_for_stages
from ..triton.worker_pool import default_workers
from .values import (  # fmt: skip
    HOST_PROGRAMS,
    LOCK_MODES,
    LOG_TOPICS,
    OptionError,
    ValueRefused,
    parse_bool,
    parse_cache_dir,
    parse_count,
    parse_cpu_pool,
    parse_cpu_products,
    parse_decisions,
    parse_host_program,
    parse_libraries,
    parse_limit,
    parse_lock,
    parse_lock_mode,
    parse_log,
    parse_loss_chunk,
    parse_numerics,
    parse_path,
    parse_regions,
    parse_remote,
    parse_schedules,
    parse_seconds,
    parse_size,
    parse_target,
    parse_threads,
    parse_tune,
    parse_tune_numerics,
    parse_verify,
    parse_workers,
    seconds_text,
    size_text,
)
from .variables import STRICT_PREFIX, Environment, read_environment

MODES: dict[str, dict[str, object]] = {
    "default": {},
    "max-autotune": {"tune": True},
    "max-autotune-no-cudagraphs": {"tune": True},
    "reduce-overhead": {"cuda_graphs": True},
}


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

    tune: bool | str = _option(
        "MLC_TUNE",
        parse_tune,
        default=False,
        shown="0",
        values="0, model, 1, replay",
        changes_code=True,
        doc="1 measures schedules of each kernel, keeps results in the tuning database, and takes one that beats the "
        "default for sure; for a GPU that is not here it predicts their times. model measures nothing: the model that "
        "comes with the package picks. replay measures nothing and takes what the database has, also where a cache has "
        "older code.",
    )
    tune_budget: float = _option(
        "MLC_TUNE_BUDGET",
        parse_seconds,
        default=60.0,
        shown="60s",
        values="500ms, 60s, 2m, 1h",
        doc="The most time that tuning may take for one graph.",
    )
    tune_numerics: str = _option(
        "MLC_TUNE_NUMERICS",
        parse_tune_numerics,
        default="any",
        shown="any",
        values="any, same",
        changes_code=True,
        doc="same has tuning take only schedules that add in the default's order, so that results have the same bits; "
        "any takes others too, unless torch.use_deterministic_algorithms(True) is set.",
    )
    cache_dir: Path = _option(
        "MLC_CACHE_DIR",
        parse_cache_dir,
        default_factory=lambda: Path(user_cache_dir("torch_mlc")),
        shown="the user's cache folder, `torch_mlc`",
        values="a folder",
        doc="Where compiled graphs and tuning results are kept between processes.",
    )
    cache: bool = _option(
        "MLC_CACHE",
        parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        doc="Read and write compiled graphs on disk.",
    )
    cache_size: int = _option(
        "MLC_CACHE_SIZE",
        parse_size,
        default=DEFAULT_LIMIT,
        shown="4GiB",
        values="512MiB, 4GiB, …",
        doc="The most that the cache folder may hold; what was used longest ago goes first.",
    )
    cache_remote: str | None = _option(
        "MLC_CACHE_REMOTE",
        parse_remote,
        default=None,
        shown="none",
        values="a URL for fsspec: s3://…, gs://…, file:///…",
        doc="A place that machines share, asked where the cache folder has nothing and given what is compiled. Who may "
        "write there can have code run here.",
    )
    target: str | None = _option(
        "MLC_TARGET",
        parse_target,
        default=None,
        shown="from the tensors",
        values="cpu, cuda:sm_90, hip:gfx942, …",
        changes_code=True,
        doc="Compile for this machine; a GPU target needs no GPU to compile.",
    )
    dump_dir: Path | None = _option(
        "MLC_DUMP_DIR",
        parse_path,
        default=None,
        shown="none",
        values="a folder",
        doc="Write the IR after every pass, the schedules and the emitted sources here, as numbered files.",
    )
    verify: int = _option(
        "MLC_VERIFY",
        parse_verify,
        default=0,
        shown="0",
        values="0, 1, 2",
        changes_code=True,
        doc="1 checks the IR before and after each pass, and runs each kernel that is built on small awkward sizes "
        "against its definition, and waits for each launch on a GPU, so that a kernel that fails is named; 2 also "
        "compares every run of a graph with its ATen ops.",
    )
    log: tuple[str, ...] = _option(
        "MLC_LOG",
        parse_log,
        default=(),
        shown="none",
        values="a comma list of " + ", ".join(LOG_TOPICS),
        doc="Print what happened on these topics to standard error.",
    )
    numerics: Numerics = _option(
        "MLC_NUMERICS",
        parse_numerics,
        default="fast",
        shown="fast",
        values="fast, eager, or a file (.json) of places; as an option also a mapping",
        changes_code=True,
        doc="fast keeps what was float32 so inside a fused kernel of half types; eager rounds wherever eager does; a "
        "mapping says it by places (docs/attribution.md).",
    )
    threads: int | None = _option(
        "MLC_THREADS",
        parse_threads,
        default=None,
        shown="torch.get_num_threads()",
        values="1, 2, …",
        changes_code=True,
        doc="Threads that a CPU kernel may use.",
    )
    compile_workers: int = _option(
        "MLC_COMPILE_WORKERS",
        parse_workers,
        default_factory=default_workers,
        shown="the processors, at most 8",
        values="0, 1, 2, …",
        doc="Processes that compile the kernels of a GPU graph side by side, started where a graph has several; 0 "
        "compiles one after the other in the process itself.",
    )
    strict: bool = _option(
        "MLC_STRICT",
        parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        changes_code=True,
        doc="Fail where a kernel does not compile, instead of running its ATen ops with a warning.",
    )
    fallback_random: bool = _option(
        "MLC_FALLBACK_RANDOM",
        parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        changes_code=True,
        doc="Draw random numbers by eager's own kernels, so that a seed gives eager's numbers.",
    )
    loss_chunk: int | None = _option(
        "MLC_LOSS_CHUNK",
        parse_loss_chunk,
        default=None,
        shown="auto",
        values="auto, 0, 1024, …",
        changes_code=True,
        doc="Rows of logits that exist at a time in linear + cross-entropy; auto chunks logits above 64 MiB (1 GiB on "
        "GPUs), 0 none.",
    )
    host_program: str = _option(
        "MLC_HOST_PROGRAM",
        parse_host_program,
        default="auto",
        shown="auto",
        values=", ".join(HOST_PROGRAMS),
        doc="What runs between the kernels of a graph: Python, or machine code that has no Python between them; auto "
        "is Python, and on CPUs, once a graph has been called 64 times, native where it can be.",
    )
    early_launches: bool = _option(
        "MLC_EARLY_LAUNCHES",
        parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        doc="Launch kernels before the one ahead of them has ended, for which they wait themselves, on GPUs that can "
        "(compute capability 9.0 and up); 0 launches each when the one ahead has ended.",
    )
    copy_streams: bool = _option(
        "MLC_COPY_STREAMS",
        parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        changes_code=True,
        doc="Copy between devices on streams of their own, beside the kernels that do not wait for it; 0 copies in the "
        "order of the kernels.",
    )
    cuda_graphs: bool = _option(
        "MLC_CUDA_GRAPHS",
        parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        doc="Capture what a graph launches on a GPU, and replay it: from the third call for the same sizes on.",
    )
    cuda_graph_shapes: int = _option(
        "MLC_CUDA_GRAPH_SHAPES",
        parse_count,
        default=16,
        shown="16",
        values="1, 2, …",
        doc="Captures of one graph, for different sizes or parameters; calls beyond them run as without.",
    )
    cuda_graph_copies: bool = _option(
        "MLC_CUDA_GRAPH_COPIES",
        parse_bool,
        default=True,
        shown="1",
        values="0, 1",
        doc="Copy results out of the memory of a captured graph; 0 hands that memory out, and captures the graph again "
        "where it is called before the results are gone.",
    )
    memory_limit: int | None = _option(
        "MLC_MEMORY_LIMIT",
        parse_limit,
        default=None,
        shown="none",
        values="512MiB, 8GiB, …",
        changes_code=True,
        doc="The most that one graph may hold beyond parameters and the caller's inputs. In training more is computed "
        "again to stay below it; a graph that still would not is refused, with what it holds.",
    )
    freeze: bool = _option(
        "MLC_FREEZE",
        parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        doc="The caller promises that parameters and buffers do not change: in graphs without gradients, what depends "
        "on them alone is computed at the first call and kept. One that changed is an error at the next call.",
    )
    freeze_discard: bool = _option(
        "MLC_FREEZE_DISCARD",
        parse_bool,
        default=False,
        shown="0",
        values="0, 1",
        doc="With freeze, on CPUs: a weight that a graph needs only packed or folded gives its memory back at the "
        "first call. Whoever reads it after that gets no numbers; another graph that needs it is an error.",
    )
    cpu_pool: int | None = _option(
        "MLC_CPU_POOL",
        parse_cpu_pool,
        default=None,
        shown="auto",
        values="auto, 0, 512MiB, …",
        doc="Memory of the CPU that programs use again: how much may be held beyond what was in use at the recent "
        "peak. auto is a few percent of that, 0 holds nothing. All programs of a process share it; what the last graph "
        "that was compiled says holds.",
    )
    cpu_products: str = _option(
        "MLC_CPU_PRODUCTS",
        parse_cpu_products,
        default="auto",
        shown="auto",
        values="auto, blas",
        changes_code=True,
        doc="Which library multiplies matrices of float32 on CPUs. auto takes oneDNN where torch's BLAS has narrower "
        "vectors than the processor; blas is that BLAS.",
    )
    libraries: str = _option(
        "MLC_LIBRARIES",
        parse_libraries,
        default="aten",
        shown="aten",
        values="aten, cblas, none",
        changes_code=True,
        doc="Which libraries compute what kernels could too. aten are those that torch calls, where they are faster. "
        "With none kernels compute everything that they can, and call nothing but libm and a team's functions; cblas "
        "leaves products of float32 and float64 on CPUs to a library, where those are faster, and nothing else.",
    )
    schedules: Overrides | None = _option(
        "MLC_SCHEDULES",
        parse_schedules,
        default=None,
        shown="none",
        values="a script (.py) or traces (.json); as an option also a mapping",
        doc="Schedules by hand for kernels, by the hash of their workload (docs/scheduling.md).",
    )
    decisions: DecisionOverrides | None = _option(
        "MLC_DECISIONS",
        parse_decisions,
        default=None,
        shown="none",
        values="a file (.json); as an option also a mapping",
        changes_code=True,
        doc="What to decide by hand that is decided by cost elsewhere, by kind and key (docs/decisions.md).",
    )
    regions: Cuts | str | int = _option(
        "MLC_REGIONS",
        parse_regions,
        default="auto",
        shown="auto",
        values="auto, 0, or cuts as in =1,16,%8",
        changes_code=True,
        doc="Whether a graph with a size that varies may have several programs, each for a region of that size "
        "(docs/regions.md): auto where that is predicted to be faster, 0 never. =1 has a program for the size 1 alone, "
        "16 begins one at 16, and %8 parts the largest sizes by whether they are multiples of 8.",
    )
    lock: Path | None = _option(
        "MLC_LOCK",
        parse_lock,
        default=None,
        shown="none",
        values="a file, such as model.mlc.lock",
        doc="A file of all that is decided for a model's graphs (docs/lock.md).",
    )
    lock_mode: str = _option(
        "MLC_LOCK_MODE",
        parse_lock_mode,
        default="check",
        shown="check",
        values=", ".join(LOCK_MODES),
        doc="What is done with the lock file: check fails where a graph is decided otherwise, or is not in the file; "
        "write puts what is decided into the file; use decides as the file says.",
    )

    @classmethod
    def resolve(cls, mode: str | None, options: Mapping[str, object] | None, environ: Mapping[str, str]) -> "Options":
        """Read the settings: `options` and `mode` (of torch.compile) over the variables in `environ` over defaults.

        Raises: OptionError for a mode, key, variable or value that does not exist.
        """
        specs = {spec.name: spec for spec in option_specs()}
        found = variables_in(environ)
        for variable, near in found.wrong.items():
            raise _wrong_variable(variable, near)
        values: dict[str, Any] = {}
        for spec in specs.values():
            given = found.given.get(spec.variable)
            if given is not None:
                values[spec.name] = _parsed(spec, given.text, f"{given.variable}={given.text}")
        values |= _of_mode(mode)
        for key, value in (options or {}).items():
            if key not in specs:
                raise _unknown_key(str(key), tuple(specs))
            values[key] = _parsed(specs[key], value, f"options={{{key!r}: {value!r}}}")
        return cls(**values)

    @property
    def shows_stages(self) -> bool:
        """Whether somebody looks at what only compiling tells, so that no cache may answer: ``dump_dir``, and what logs
        tell of fusion, schedules and sources."""
        return self.dump_dir is not None or asks_for_stages(self.log)

    @property
    def gpu(self) -> str | None:
        """The GPU that code is made for, where one is named."""
        return None if self.target is None or self.target.startswith("cpu") else self.target

    @property
    def retunes(self) -> bool:
        """Whether schedules are looked for anew, so that no cache of code may answer."""
        return self.tune is True or self.tune == "replay"

    def fingerprint(self) -> str:
        """The settings that change what is compiled or checked, as stable text for a cache key."""
        return ";".join(f"{spec.name}={getattr(self, spec.name)!r}" for spec in option_specs() if spec.changes_code)


def option_specs() -> tuple[OptionSpec, ...]:
    """Every setting, in the order of the documentation."""
    return tuple(map(_spec, fields(Options)))


def typed_value(spec: OptionSpec, value: object) -> str:
    """A setting's value as one types it: 0, 60s, 4GiB; what "default" means where it is None."""
    if value is None or value == ():
        return spec.shown_default
    if spec.parse is parse_seconds:
        return seconds_text(float(str(value)))
    if spec.parse in (parse_size, parse_limit, parse_cpu_pool):
        return size_text(int(str(value))) if value != 0 else "0"  # which only those take that have a use for it
    return str(int(value)) if isinstance(value, bool) else ",".join(value) if isinstance(value, tuple) else str(value)


def _spec(row: Field[Any]) -> OptionSpec:
    meta = row.metadata
    return OptionSpec(
        row.name, meta["variable"], meta["parse"], meta["values"], meta["shown"], meta["doc"], meta["code"]
    )


def _of_mode(mode: str | None) -> Mapping[str, object]:
    if mode is None:
        return {}
    if mode not in MODES:
        near = get_close_matches(str(mode), MODES, n=1)
        raise _unknown("mode", str(mode), near[0] if near else "", MODES, 'correct torch.compile(mode="…")')
    return MODES[mode]


def _parsed(spec: OptionSpec, value: object, asked: str) -> Any:
    try:
        return spec.parse(value)
    except ValueRefused as no:
        near = get_close_matches(no.wrong, no.known, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(
            f"{asked}: {spec.name} ({spec.variable}) cannot be {no.wrong or str(value)!r}.{guess} Valid: {no.valid}."
        ) from None


def variables_in(environ: Mapping[str, str]) -> Environment:
    """What an environment has of our settings, of misspelt ones, and of others that begin with ``MLC_``."""
    return read_environment(environ, [spec.variable for spec in option_specs()])


def _wrong_variable(variable: str, near: str) -> OptionError:
    known = [spec.variable for spec in option_specs()]
    if variable.startswith(STRICT_PREFIX):
        known = [f"TORCH_{name}" for name in known]
    mend = "unset it, or correct its name" if near else "unset it"
    return _unknown("environment variable", variable, near, known, mend)


def _unknown_key(key: str, known: Sequence[str]) -> OptionError:
    if key in ("mode", "dynamic", "fullgraph", "backend"):
        mend = f"{key} is an argument of torch.compile itself: torch.compile(…, {key}=…, options={{…}})"
        return _unknown("option", key, "", known, mend)
    near = get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    return _unknown("option", key, near[0] if near else "", known, 'correct the key in torch.compile(options={"…": …})')


def _unknown(what: str, name: str, near: str, known: Iterable[str], mend: str) -> OptionError:
    guess = f" Did you mean {near!r}?" if near else ""
    return OptionError(f"torch-mlc has no {what} {name!r}.{guess} Valid: {', '.join(known)}. To mend: {mend}.")


def options_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    rows = ["| `options=` key | variable | values | default | what it does |", "|---|---|---|---|---|"]
    for spec in option_specs():
        rows.append(f"| `{spec.name}` | `{spec.variable}` | {spec.values} | {spec.shown_default} | {spec.doc} |")
    return "\n".join(rows) + "\n"


def options_markdown() -> str:
    """The page docs/options.md."""
    return f"""# Settings

Made by `python -m torch_mlc options --markdown` from `runtime/settings/options.py`; do not edit.

`torch.compile(model, backend="mlc", options={{…}})` goes over the variables, and those over the defaults.
Every variable may also be written `TORCH_MLC_…` (`TORCH_MLC_TUNE=1`), which goes over `MLC_…`. All are read once, when
a graph is compiled. A wrong name or value is an error that names the nearest right one. Other projects have variables
that begin with `MLC_` too: those are left alone, unless they are near misses of these (`MLC_TUNNE`); a wrong
`TORCH_MLC_…` is always an error. `python -m torch_mlc options` shows what holds here, and where each value comes from.

{options_table()}
`mode="max-autotune"` and `mode="max-autotune-no-cudagraphs"` set `tune`, `mode="reduce-overhead"` sets `cuda_graphs`.
"""
