"""What candidates of tuning run on, how their results are compared, and how CPUs time them.

Candidates run on random inputs of the nest's shapes (typical sizes where they are symbolic) and take turns on CPUs, so
that a machine that slows down slows all of them. A candidate whose results differ from the default schedule's is an
error, whatever its time. The process in which they run is ``measure_service.py``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy
import torch

from ...ir.errors import MlcError
from ...ir.expr.value import Expr, Load, is_value, walk
from ...ir.nest.loops import Buffer, LoopNest, Update, blocks
from ...scheduler.tuning.database import Verdict
from ...scheduler.tuning.race import TOGETHER, turns

# Seconds of one sample (calls repeat to fill it), and of rounds that are run at a time: the last one is that in which
# they are over.
SAMPLE_SECONDS = 4e-4
ROUNDS_SECONDS = 2.0
# Inputs and outputs beyond this many bytes are not allocated only to find out which schedule is faster.
MAX_BYTES = 8 << 30
# How far operands move, in bytes, and by how much at least.
SLACK, LINE = 8192, 64


class MeasureError(MlcError):
    """A candidate cannot be timed, as its ``verdict`` says: it is too large for that, it does not end well, or its
    results are not those of the default schedule."""

    def __init__(self, text: str, verdict: Verdict = Verdict.FAILED) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(slots=True)
class Arguments:
    """Tensors of a nest's parameters in call order, of which the last ``outputs`` are written, and its sizes.

    Each lies somewhere in a ``storage`` that is a little larger, and moves there: how operands lie to each other and to
    pages is no property of a schedule. ``moves`` counts that. ``passed`` are addresses and sizes, always the same list.
    """

    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    outputs: int
    storages: tuple[torch.Tensor, ...] = ()
    moves: int = 0
    passed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.passed[:] = (*(t.data_ptr() for t in self.tensors), *self.sizes)

    def move(self, rng: random.Random) -> None:
        """Have every tensor lie elsewhere, with its elements, at a multiple of a cache line."""
        moved = []
        for tensor, storage in zip(self.tensors, self.storages, strict=True):
            slack = SLACK // storage.itemsize
            span, old = storage.numel() - slack, tensor.storage_offset()
            new = rng.randrange(0, slack + 1, LINE // storage.itemsize)
            if span > 0 and new != old:
                storage[new : new + span] = storage[old : old + span].clone()
            moved.append(storage.as_strided(tensor.shape, tensor.stride(), new))
        self.tensors = tuple(moved)
        self.moves += 1
        self.passed[:] = (*(t.data_ptr() for t in self.tensors), *self.sizes)


def make_arguments(nest: LoopNest, device: str, seed: int = 0) -> Arguments:
    """Random arguments of a nest: normal floats, coins, and integers that are indices where they are used as such.

    Raises:
        MeasureError: they would take more than ``MAX_BYTES``.
    """
    hint = nest.symbols.hint
    spans = {b.name: _span(b, nest) for b in nest.params}
    total = sum(spans[b.name] * b.dtype.itemsize for b in nest.params)
    if total > MAX_BYTES:
        raise MeasureError(f"{nest.name} takes {total >> 20} MiB of arguments; tuning stops at {MAX_BYTES >> 20}")
    generator = torch.Generator(device).manual_seed(seed)
    limits = index_limits(nest, hint)
    tensors, storages = [], []
    for b in nest.params:
        storage = torch.empty(spans[b.name] + SLACK // b.dtype.itemsize, dtype=b.dtype.torch, device=device)
        storages.append(storage)
        if b in nest.given:
            _fill(storage, limits.get(b.name), generator)
        else:
            storage.zero_()
        shape = [hint(e) for e in b.shape]
        tensors.append(torch.as_strided(storage, shape, [hint(e) for e in b.strides]))
    sizes = tuple(hint(s) for s in nest.symbols.symbols)
    return Arguments(tuple(tensors), sizes, len(nest.outputs), tuple(storages))


def _span(buffer: Buffer, nest: LoopNest) -> int:
    """Elements from the first to the last of a buffer."""
    hint = nest.symbols.hint
    shape = [hint(e) for e in buffer.shape]
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * hint(s) for n, s in zip(shape, buffer.strides, strict=True))


def _fill(storage: torch.Tensor, limit: int | None, generator: torch.Generator) -> None:
    if storage.dtype.is_floating_point or storage.dtype.is_complex:
        wide = torch.float32 if storage.dtype.itemsize < 4 else storage.dtype
        storage.copy_(torch.empty_like(storage, dtype=wide).normal_(generator=generator))
    else:
        storage.random_(0, max(limit or 2, 1), generator=generator)


def index_limits(nest: LoopNest, size_of: Callable[[sympy.Expr], int]) -> dict[str, int]:
    """The least dimension that each buffer's elements index: values below it are in range wherever they go."""
    buffers, limits = nest.buffers, dict[str, int]()

    def look(value: Expr) -> None:
        for e in walk(value):
            if isinstance(e, Load):
                for index, size in zip(e.indices, buffers[e.buffer].shape, strict=True):
                    if is_value(index):
                        limit(index, size)

    def limit(index: Expr, size: sympy.Expr) -> None:
        for e in walk(index):
            if isinstance(e, Load):
                limits[e.buffer] = min(size_of(size), limits.get(e.buffer, 1 << 62))

    for block, _ in blocks(nest):
        for s in block.body:
            for v in s.values if isinstance(s, Update) else (s.value,):
                look(v)
        for w in block.writes:
            for index, size in zip(w.indices, buffers[w.buffer].shape, strict=True):
                if is_value(index):
                    limit(index, size)
    return limits


# --- results and times ------------------------------------------------------------------------------------------------

Run = Callable[[], None]


class Bench:
    """What all candidates of a nest share: arguments, made when they are wanted, and the results of the first."""

    def __init__(self, nest: LoopNest, device: str) -> None:
        self._nest = nest
        self._device = device
        self._arguments: Arguments | None = None
        self._expected: tuple[torch.Tensor, ...] | None = None
        # By output, how far a result may be from what is expected; known once one differs in a bit.
        self._margins: dict[int, float] = {}
        # What the outputs hold before a run: an update in place reads it.
        self._before: tuple[torch.Tensor, ...] = ()
        self._rng = random.Random(0)

    @property
    def arguments(self) -> Arguments:
        if self._arguments is None:
            self._arguments = made = make_arguments(self._nest, self._device)
            self._before = tuple(t.clone() for t in made.tensors[len(made.tensors) - made.outputs :])
        return self._arguments

    def move(self) -> None:
        """Have the arguments lie elsewhere in memory."""
        self.arguments.move(self._rng)

    def check(self, run: Run) -> None:
        """Run once, to the end. Raises MeasureError where the results are not those of the first candidate."""
        tensors = self.arguments.tensors
        outputs = tensors[len(tensors) - self.arguments.outputs :]
        for o, before in zip(outputs, self._before, strict=True):
            o.copy_(before)
        run()
        if self._expected is None:
            self._expected = tuple(o.clone() for o in outputs)
            return
        for k, (have, want) in enumerate(zip(outputs, self._expected, strict=True)):
            # Most candidates give the same bits, which takes one pass to see and not a dozen.
            if torch.equal(have, want):
                continue
            if k not in self._margins:
                self._margins[k] = 2e-2 * scale_of(want)
            if not torch.allclose(have, want, rtol=2e-2, atol=self._margins[k], equal_nan=True):
                raise MeasureError(f"output {k} differs from the default schedule's", Verdict.WRONG)


def scale_of(t: torch.Tensor) -> float:
    """A typical magnitude, that of the finite elements' root mean square."""
    if not t.numel() or not t.dtype.is_floating_point:
        return 0.0
    values = t.float().nan_to_num(0.0, 0.0, 0.0)
    return max(float(values.square().mean().sqrt()), 1e-6)


class ProcessorClock:
    """Samples of runs on this processor: seconds a call, of as many calls as fill one.

    ``clock`` is what samples are taken by. Where runs have one thread, that is the thread's own processor time
    (``of_threads``): what else runs on the machine may stop the thread, and that is no property of a schedule.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._wall = clock if wall is None else wall
        self._repeats = 0

    @staticmethod
    def of_threads(threads: int) -> ProcessorClock:
        """For runs by a team of so many threads."""
        return ProcessorClock(time.thread_time if threads == 1 else time.perf_counter, time.perf_counter)

    def samples(
        self, runs: Mapping[int, Run], rounds: int, begun: int, move: Callable[[], None] = lambda: None
    ) -> dict[int, list[float]]:
        """Samples in rounds, in which runs take turns (``turns``); fewer where they take long. Operands ``move`` before
        each few rounds that a race takes for one."""
        # As many calls for everyone: what a sample costs besides its calls would make equals differ.
        if runs and not self._repeats:
            self._repeats = self._calls(next(iter(runs.values())))
        found: dict[int, list[float]] = {n: [] for n in runs}
        end = self._wall() + ROUNDS_SECONDS
        for k, order in enumerate(turns([*runs], rounds, begun)):
            if k % TOGETHER == 0:
                move()
            for number in order:
                found[number].append(self._sample(runs[number], self._repeats))
            if self._wall() >= end:
                break
        return found

    def _sample(self, run: Run, repeats: int) -> float:
        run()  # another has had the caches since
        before = self._clock()
        for _ in range(repeats):
            run()
        return (self._clock() - before) / repeats

    def _calls(self, run: Run) -> int:
        least = SAMPLE_SECONDS
        for _ in range(5):
            before = self._clock()
            run()
            least = min(least, self._clock() - before)
        return max(1, min(1000, int(SAMPLE_SECONDS / max(least, 1e-7))))
