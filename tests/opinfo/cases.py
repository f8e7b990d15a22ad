"""What is checked: the operators of torch's own database, the element types each one takes, and its samples."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

from .layouts import LAYOUTS, laid_out

DTYPES = (
    *("float32", "float64", "bfloat16", "float16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64"),
)
# The telling sample of a job is one of so many, and more elements than so many tell no more.
_FIRST, _MANY = 12, 64
MODES = ("forward", "gradient", "inplace", "out", *LAYOUTS, "errors", "refused")
# Modes of calls that eager is to refuse.
REFUSALS = ("errors", "refused")


@dataclass(frozen=True, slots=True)
class Job:
    """One operator on one element type. ``mode`` is one of MODES: ``inplace`` is the variant that writes to its first
    operand, ``out`` the one that writes to a tensor it is given; the layouts are forward, of operands that lie so;
    ``errors`` are the calls of which the database says that they raise, whatever their element types; ``refused`` are
    calls on an element type that the database does not say eager has a kernel for.
    """

    op: str
    dtype: str
    mode: str = "forward"

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.mode}"

    @classmethod
    def of(cls, record: dict[str, Any]) -> Job:
        """The job that a result belongs to."""
        return cls(record["op"], record["dtype"], record["mode"])


@dataclass(frozen=True, slots=True)
class Sample:
    """A call: ``op(input, *args, **kwargs)``. ``ends`` picks of its results what a gradient starts from."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ends: Callable[[Any], Any]

    def mapped(self, fn: Callable[[Any], Any]) -> Sample:
        """The call with other operands."""
        return replace(self, input=fn(self.input), args=fn(self.args), kwargs=fn(self.kwargs))


def name_of(info: OpInfo) -> str:
    """The operator's name, with that of its variant: ``std`` has a variant ``std.unbiased``."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@lru_cache(maxsize=1)
def operators() -> dict[str, OpInfo]:
    """torch's database by name."""
    return {name_of(info): info for info in op_db}


def jobs(dtypes: tuple[str, ...] = DTYPES, modes: tuple[str, ...] = MODES) -> Iterator[Job]:
    """Every job that the database declares for CPUs, operator by operator."""
    for name, info in operators().items():
        forward = info.supported_dtypes("cpu")
        backward = info.supported_backward_dtypes("cpu") if info.supports_autograd else set()
        for dtype in dtypes:
            kind = getattr(torch, dtype)
            possible = {
                "forward": kind in forward,
                "gradient": kind in backward and kind in forward,
                "inplace": kind in forward and info.inplace_variant is not None,
                "out": kind in forward and info.supports_out,
                **dict.fromkeys(LAYOUTS, kind in forward),
                "errors": dtype == DTYPES[0] and info.error_inputs_func is not None,
                "refused": kind not in forward and _resembling(info, kind) is not None,
            }
            yield from (Job(name, dtype, mode) for mode in modes if possible[mode])


def samples(job: Job, most: int = 0) -> list[Sample]:
    """The database's samples, the first ``most`` of them where that is not 0; the same in every process."""
    torch.manual_seed(zlib.crc32(f"{job.op} {job.dtype}".encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info, dtype = operators()[job.op], getattr(torch, job.dtype)
        if job.mode == "errors":
            found = (illegal.sample_input for illegal in info.error_inputs("cpu"))
        elif job.mode == "refused":
            found = _of_refused(info, dtype)
        else:
            found = info.sample_inputs("cpu", dtype, requires_grad=job.mode == "gradient")
        drawn = (Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad) for s in found)
        if job.mode in LAYOUTS:
            drawn = (made for s in drawn if (made := _laid_out(s, job.mode)) is not None)
        return list(islice(drawn, most or None))


def _resembling(info: OpInfo, dtype: torch.dtype) -> torch.dtype | None:
    """The element type that an operator takes and whose values are most like those of ``dtype``."""
    known = [kind for name in DTYPES if (kind := getattr(torch, name)) in info.supported_dtypes("cpu")]
    alike = [k for k in known if (k.is_floating_point, k.is_complex) == (dtype.is_floating_point, dtype.is_complex)]
    return next(iter((*alike, *known)), None)


def _of_refused(info: OpInfo, dtype: torch.dtype) -> Iterator[Any]:
    """Samples of the element type most like ``dtype``, whose tensors are converted to it."""
    base = _resembling(info, dtype)
    assert base is not None

    def convert(value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype is base and dense(t) else t, value)

    for s in info.sample_inputs("cpu", base):
        s.input, s.args, s.kwargs = convert(s.input), convert(s.args), convert(s.kwargs)
        yield s


def telling(job: Job) -> list[Sample]:
    """One sample that says most: of the first ones, which often have one element or none, the first with many."""

    def elements(sample: Sample) -> int:
        return sum(t.numel() for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if torch.is_tensor(t))

    return sorted(samples(job, _FIRST), key=lambda s: -min(elements(s), _MANY))[:1]


def _laid_out(sample: Sample, layout: str) -> Sample | None:
    """The call with its operands in that layout, or None where they all are as they were."""
    others = 0

    def lay(t: torch.Tensor) -> torch.Tensor:
        nonlocal others
        made = laid_out(t, layout)
        others += made is not t
        return made

    made = sample.mapped(lambda value: tree_map_only(torch.Tensor, lay, value))
    return made if others else None


def copied(sample: Sample) -> Sample:
    """A sample with tensors of its own, of the same strides, offsets and overlaps."""

    def again(t: torch.Tensor) -> torch.Tensor:
        plain = t.detach()
        if not dense(t) or t.is_conj() or t.is_neg():
            return plain.clone().requires_grad_(t.requires_grad)
        memory = plain.untyped_storage().clone()
        return (
            torch.empty(0, dtype=t.dtype, device=t.device)
            .set_(memory, t.storage_offset(), t.shape, t.stride())
            .requires_grad_(t.requires_grad)
        )

    return sample.mapped(lambda value: tree_map_only(torch.Tensor, again, value))


def dense(t: torch.Tensor) -> bool:
    """Whether a tensor has strides."""
    return t.layout is torch.strided


def widened(sample: Sample) -> Sample:
    """The sample in float64 (complex128), for a reference."""
    wide = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else wide.get(value, value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        if value.is_complex():
            return value.detach().to(torch.complex128).requires_grad_(value.requires_grad)
        return value

    return sample.mapped(lambda value: tree_map_only((torch.Tensor, torch.dtype), widen, value))


def moved(sample: Sample, seed: int, dtype: torch.dtype) -> Sample:
    """A sample of ``widened``, each element moved as a rounding to ``dtype`` would: of itself, or of what is usual in
    its tensor, for an operator that adds to an element rounds the sum.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = torch.finfo(dtype).eps / 2

    def move(t: torch.Tensor) -> torch.Tensor:
        if t.dtype not in (torch.float64, torch.complex128) or not t.numel() or not dense(t):
            return t
        with torch.no_grad():
            size = t.abs() + t.abs().square().mean().sqrt().nan_to_num(0.0, 0.0)
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            return (t + noise * unit * size).requires_grad_(t.requires_grad)

    return sample.mapped(lambda value: tree_map_only(torch.Tensor, move, value))
