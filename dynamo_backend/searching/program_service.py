"""What runs programs of a graph, in a process of its own (``service_worker.py``).

A request says what to ``do``: ``begin`` with inputs, ``prepare`` a program, ``time`` what is prepared in so many
rounds, ``drop`` some of it, ``end``. Results are compared with those of the first program, inputs that it writes to
among them; before each run these are what they were. An answer holds samples, or a ``verdict`` and its ``reason``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...ir.errors import MlcError
from ...runtime.tuning.measure import MeasureError, ProcessorClock, Run, scale_of
from ...scheduler.tuning.database import Verdict
from ..caches.saved_program import SavedProgram

# What a program may raise: all else is a defect of this file, and told as that.
ERRORS = (MlcError, RuntimeError, MemoryError, IndexError, ValueError, TypeError)
SEED = 20


class ProgramService:
    """Answers requests about one graph at a time. ``load`` makes a program of its bytes."""

    def __init__(self, load: Callable[[bytes], Callable[[list[Any]], Sequence[Any]]] | None = None) -> None:
        self._load = _loaded if load is None else load
        self._clock = ProcessorClock()
        self._inputs: list[Any] = []
        self._consumed: frozenset[int] = frozenset()
        # What is written over, and what it was.
        self._written: dict[int, torch.Tensor] = {}
        self._expected: list[Any] | None = None
        self._runs: dict[int, Run] = {}

    def __call__(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        try:
            return self._done(request, parts), ()
        except ERRORS as error:
            text = f"{type(error).__name__}: {error}" if not isinstance(error, MlcError) else str(error)
            verdict = error.verdict if isinstance(error, MeasureError) else Verdict.FAILED
            return {"reason": text, "verdict": verdict.value, "lost": False}, ()

    def _done(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> dict[str, Any]:
        match request["do"]:
            case "begin":
                self._end()
                torch.set_num_threads(request["threads"])
                self._inputs = made_inputs(request["inputs"])
                self._consumed = frozenset(request["inputs"]["consumed"])
            case "prepare":
                self._prepare(request["id"], self._load(parts[0]))
            case "time":
                runs = {k: self._runs[k] for k in request["ids"]}
                found = self._clock.samples(runs, request["rounds"], request["begun"], _stay)
                return {"samples": {str(k): [s] for k, s in found.items()}}
            case "drop":
                for number in request["ids"]:
                    self._runs.pop(number, None)
            case "end":
                self._end()
        return {}

    def _prepare(self, number: int, program: Callable[[list[Any]], Sequence[Any]]) -> None:
        first = self._expected is None
        before = [x.clone() if first and isinstance(x, torch.Tensor) else None for x in self._inputs]
        torch.manual_seed(SEED)
        self._restore()
        results = [*program(self._arguments())]
        if first:
            for k, (now, was) in enumerate(zip(self._inputs, before, strict=True)):
                if was is not None and not _is_same(now, was):
                    self._written[k] = was
        results += [self._inputs[k].clone() for k in self._written]
        if first:
            self._expected = [r.clone() if isinstance(r, torch.Tensor) else r for r in results]
        else:
            _compare(results, self._expected or [])

        def run() -> None:
            self._restore()
            program(self._arguments())

        self._runs[number] = run

    def _arguments(self) -> list[Any]:
        return [x.clone() if k in self._consumed else x for k, x in enumerate(self._inputs)]

    def _restore(self) -> None:
        for k, was in self._written.items():
            self._inputs[k].copy_(was)

    def _end(self) -> None:
        self._inputs, self._written, self._runs, self._expected = [], {}, {}, None
        self._clock = ProcessorClock()


def _stay() -> None:
    """Inputs of a whole graph keep their places: what is made between its kernels lies elsewhere each time anyway."""


def made_inputs(told: Mapping[str, Any]) -> list[Any]:
    """Random inputs: normal floats, parameters small enough that layers keep the size of what goes through them,
    positive where they are vectors, and integers below the limit."""
    generator = torch.Generator().manual_seed(SEED)
    return [x if isinstance(x, int) else _made(x, told["limit"], generator) for x in told["items"]]


def _made(told: Mapping[str, Any], limit: int, generator: torch.Generator) -> torch.Tensor:
    shape, strides, dtype = told["shape"], told["strides"], getattr(torch, told["dtype"])
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    storage = torch.empty(span, dtype=dtype)
    if not dtype.is_floating_point:
        storage.random_(0, 2 if dtype is torch.bool else limit, generator=generator)
    elif told["static"] and len(shape) == 1:
        storage.copy_(torch.empty(span).uniform_(0.5, 1.5, generator=generator))
    else:
        wide = torch.empty(span, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
        wide.normal_(generator=generator)
        if told["static"] and len(shape) > 1 and span:
            wide *= (wide.numel() / shape[0]) ** -0.5
        storage.copy_(wide)
    return torch.as_strided(storage, shape, strides)


def _is_same(now: torch.Tensor, was: torch.Tensor) -> bool:
    return torch.equal(now.nan_to_num() if now.is_floating_point() else now,
                       was.nan_to_num() if was.is_floating_point() else was)  # fmt: skip


def _compare(results: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises MeasureError where results are not those of the first program."""
    if len(results) != len(expected):
        raise MeasureError(f"{len(results)} results, and {len(expected)} by default", Verdict.WRONG)
    for k, (have, want) in enumerate(zip(results, expected, strict=True)):
        if not isinstance(want, torch.Tensor):
            same = have == want
        elif not isinstance(have, torch.Tensor) or (have.shape, have.dtype) != (want.shape, want.dtype):
            same = False
        elif want.dtype.is_floating_point:
            same = torch.allclose(have, want, rtol=2e-2, atol=2e-2 * scale_of(want), equal_nan=True)
        else:
            same = torch.equal(have, want)
        if not same:
            raise MeasureError(f"result {k} differs from the default program's", Verdict.WRONG)


def _loaded(data: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """A program that the process which started this one has pickled."""
    saved = pickle.loads(data)
    assert isinstance(saved, SavedProgram)
    call = saved.load().call
    assert call is not None
    return call


def service() -> ProgramService:
    """What answers the requests of one process."""
    return ProgramService()
