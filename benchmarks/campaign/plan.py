"""What a campaign does, stage by stage, in the minutes that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ..kernel_texts.corpus import gradients_of
from ..kernels.case import VARIANTS
from ..kernels.registry import KERNELS
from ..models.spec import Size

Minutes: TypeAlias = Literal[10, 45]
INFERENCE, TRAINING = "inference", "training"
# Files of tests that are marked for a GPU.
GPU_TESTS = (
    "tests/runtime/triton/test_gpu.py", "tests/runtime/gpu/test_table.py", "tests/runtime/host/test_cuda_graphs.py",
    "tests/dynamo_backend/host/test_copy_streams.py", "tests/runtime/tuning/test_machine.py",
    "tests/dynamo_backend/host/test_gpu_threads.py", "tests/dynamo_backend/host/test_native_host_gpu.py",
    "tests/dynamo_backend/host/test_cuda_graphs.py", "tests/codegen/triton/test_functions.py",
    "tests/codegen/triton/rules/test_rules.py", "tests/codegen/triton/rules/test_contractions.py",
    "tests/codegen/triton/rules/test_contraction_copies.py", "tests/codegen/triton/rules/test_attention.py",
)  # fmt: skip
# What a driver that the CPU plays is called for, by many threads.
TRIALS = ("kernels", "products", "a table", "a table, dynamic")
MODELS_RUN = ("gpt2_d768, training", "llama_decode, inference")
PEERS = ("default", "max-autotune")


@dataclass(frozen=True, slots=True)
class Settings:
    """What every process of a campaign is told. ``gpu``: there is one; ``device`` is that of the tensors. ``target`` is
    the GPU that is compiled for where none is here, or whose precompiled ``cache`` is used. ``size`` says how many
    checks there are and how large models are."""

    gpu: bool
    device: str
    target: str
    size: Size
    minutes: Minutes
    cache: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Checks of one stage, which share a process unless one of them ends it. ``each`` and ``seconds`` are the most that
    one of them and all may take. ``without``: what becomes of it without a GPU, "" where there is one."""

    name: str
    checks: tuple[str, ...]
    each: float
    seconds: float
    without: str = ""


_DTYPES = ("bfloat16", "float32", "float16")
# Of sizes: kernels compared, kernels under the sanitizer, kernels timed, kernels with counters.
_COUNTS: dict[Size, tuple[int, int, int, int]] = {
    "tiny": (4, 2, 2, 1), "small": (60, 5, 30, 5), "full": (300, 20, 120, 15)
}  # fmt: skip
# Seconds by stage at full size: ten minutes for the first seven. Where kernels are not compiled beforehand, what is not
# begun in that time is left for ``--resume``.
_SECONDS = {
    "machine": 30.0, "tests": 80.0, "kernels": 130.0, "sanitizer": 60.0, "timing": 150.0, "counters": 60.0,
    "models": 90.0, "sweep": 1200.0, "inductor": 900.0,
}  # fmt: skip
# Kernels that one process of a tool runs, and what is between their names.
_BATCH, AND = 5, "; "
# What becomes of a stage without a GPU.
WITHOUT = {
    "machine": "the CPU's rates are measured, and there are no clocks",
    "tests": "tests marked gpu are left out; threads call programs on a driver that the CPU plays",
    "kernels": "nothing is launched: kernels are compiled, and run in Triton's interpreter",
    "sanitizer": "left out: the interpreter checks accesses in the stage kernels",
    "timing": "nothing is timed: loops and machine code are read",
    "counters": "left out",
    "models": "no step is run: models are compiled, and launches and bytes counted",
    "sweep": "no schedule is timed: each is compiled, and its figures are kept",
    "inductor": "left out",
}
# Seconds of compiling for what one check launches, and for all of them.
_FILL_EACH, _FILL_SECONDS = 300.0, 7200.0
# Nothing is as fast without a GPU: kernels are compiled, and interpreted.
_SLOWER = 4.0
STAGES = tuple(_SECONDS)
LONG = ("sweep", "inductor")


def plan(settings: Settings) -> tuple[PlannedStage, ...]:
    """The stages in order."""
    compared, sanitized, timed, counted = _COUNTS[settings.size]
    kernels = kernel_checks()
    large = [name for name in kernels if name.endswith("bfloat16, inference") or name.endswith("bfloat16, training")]
    gpu = settings.gpu
    checks: dict[str, tuple[Sequence[str], float]] = {
        "machine": (("versions", "clocks", "rates"), 60.0),
        "tests": (GPU_TESTS if gpu else TRIALS, 100.0),
        "kernels": (_spread(kernels, compared), 60.0),
        "sanitizer": (_together(_spread(kernels, sanitized)), 60.0),
        "timing": (_spread(large, timed), 60.0),
        "counters": (_together(_spread(large, counted)), 60.0),
        "models": (MODELS_RUN, 120.0),
        "sweep": (_spread(large, timed), 120.0),
        "inductor": ([f"{name}; {peer}" for name in _spread(large, timed) for peer in PEERS], 120.0),
    }
    names = STAGES if settings.minutes > 10 else tuple(n for n in STAGES if n not in LONG)
    slower = 1.0 if gpu else _SLOWER
    return tuple(
        PlannedStage(name, tuple(checks[name][0]), checks[name][1] * slower, _SECONDS[name] * slower,
                     "" if gpu else WITHOUT[name])
        for name in names
    )  # fmt: skip


def fill_plan(settings: Settings) -> tuple[PlannedStage, ...]:
    """The one stage that compiles what the others launch, into ``settings.cache``; it needs no GPU."""
    launching = [s for s in plan(settings) if s.name in ("kernels", "timing", "models")]
    names = tuple(f"{s.name}: {name}" for s in launching for name in s.checks)
    return (PlannedStage("fill", names, _FILL_EACH, _FILL_SECONDS),)


def kernel_checks() -> list[str]:
    """Names of kernels: case, variant, type, mode."""
    return [
        f"{name}, {variant}, {dtype}, {mode}"
        for name in KERNELS
        for dtype in _DTYPES
        for variant in VARIANTS
        for mode in ((INFERENCE, TRAINING) if gradients_of(name) else (INFERENCE,))
    ]


def _together(names: Sequence[str]) -> tuple[str, ...]:
    """Several kernels a check, for tools that start slowly."""
    return tuple(AND.join(names[k : k + _BATCH]) for k in range(0, len(names), _BATCH))


def _spread(names: Sequence[str], count: int) -> tuple[str, ...]:
    """So many names at most, from the first to the last."""
    if len(names) <= count:
        return tuple(names)
    return tuple(names[k * len(names) // count] for k in range(count))
