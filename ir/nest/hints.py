"""Hints: what a loop, a block or a nest is told beside what it computes.

``HINTS`` is the table of all there are: where each may stand, what it takes, who reads it, and what it may change.
Readers go through it, ``NUM_WARPS.of(nest)``; a name that is not in it is refused by ``Schedule.annotate``, by the
verifier and by the parser.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from ..expr.dots import DOTS
from .kinds import LoopKind

Value: TypeAlias = bool | int | float | str
Annotations: TypeAlias = tuple[tuple[str, Value], ...]
T = TypeVar("T", bool, int, str)


class Place(enum.Enum):
    NEST = "nest"
    LOOP = "loop"
    BLOCK = "block"


class Changes(enum.Enum):
    """The most that a hint may change."""

    SPEED = "speed"
    ORDER = "the order of reductions"
    ROUNDING = "rounding"
    MEANING = "what the nest means"


class Annotated(Protocol):
    """A nest, a loop or a block."""

    @property
    def annotations(self) -> Annotations: ...


@dataclass(frozen=True, slots=True)
class Hint(Generic[T]):
    """One entry of the table.

    ``default`` is what holds where nothing is said, and of the type that the hint takes. Values are ``choices`` where
    there are any, and numbers from ``low`` to ``high``. ``targets`` are "cpu" and "gpu". ``readers`` are the modules
    that read it. ``given_by`` is the primitive, or the step, that sets it; any but "annotate" proves something first.
    ``others`` are values that users may add to ``choices``. A hint ``of_buffer`` speaks of one parameter and is written
    ``name:parameter``; the value of one ``of_outputs`` is names of outputs between commas, that of one ``of_locals``
    pairs of a loop and a local buffer, ``loop:local``.
    """

    name: str
    default: T
    places: tuple[Place, ...]
    targets: tuple[str, ...]
    changes: Changes
    readers: tuple[str, ...]
    says: str
    kinds: tuple[LoopKind, ...] = ()
    low: int = 0
    high: int | None = None
    choices: tuple[T, ...] = ()
    others: Collection[str] = ()
    given_by: str = "annotate"
    of_buffer: bool = False
    of_outputs: bool = False
    of_locals: bool = False

    def key(self, buffer: str) -> str:
        """The name under which it speaks of one buffer."""
        return f"{self.name}:{buffer}"

    def found(self, node: Annotated, buffer: str = "") -> T | None:
        """What a nest, loop or block says; None where it says nothing."""
        said = node.annotations
        if not said:
            return None
        key = self.key(buffer) if self.of_buffer else self.name
        return cast("T | None", next((v for k, v in said if k == key), None))

    def of(self, node: Annotated, buffer: str = "") -> T:
        """What holds for a nest, loop or block."""
        value = self.found(node, buffer)
        return self.default if value is None else value

    @property
    def values(self) -> str:
        """The values that it takes, in words."""
        if self.choices:
            return ", ".join(map(repr, (*self.choices, *self.others)))
        if self.of_outputs:
            return "names of outputs between commas"
        if self.of_locals:
            return "loop:local, between commas"
        if isinstance(self.default, bool):
            return "True, False"
        return f"{self.low} to {self.high}" if self.high is not None else f"{self.low} or more"

    def takes(self, value: object) -> bool:
        if type(value) is not type(self.default):
            return False
        if self.choices:
            return value in self.choices or value in self.others
        if isinstance(value, (bool, str)):
            return True
        return value >= self.low and (self.high is None or value <= self.high)  # type: ignore[operator]

    def nearest(self, value: object) -> str:
        """The right value that is nearest to a wrong one, as text; "" where none is near."""
        if isinstance(value, str):
            near = get_close_matches(value, list(map(str, (*self.choices, *self.others))), n=1)
            return repr(near[0]) if near else ""
        if isinstance(value, bool) or isinstance(self.default, (bool, str)) or not isinstance(value, (int, float)):
            return ""
        numbers = [c for c in self.choices if isinstance(c, int)] or [self.low, *([self.high] if self.high else [])]
        return str(min(numbers, key=lambda n: abs(n - value)))


_NEST, _LOOP, _BLOCK = (Place.NEST,), (Place.LOOP,), (Place.BLOCK,)
_IN_A_THREAD = (LoopKind.SERIAL, LoopKind.VECTORIZED, LoopKind.UNROLLED)
_CPU, _GPU, _ALL = ("cpu",), ("gpu",), ("cpu", "gpu")

# --- what a nest is ---------------------------------------------------------------------------------------------------

IN_PLACE = Hint(
    "in_place", "", _NEST, _ALL, Changes.MEANING, ("ir.nest.loops",),
    "Outputs whose old elements the nest reads.", given_by="lowering", of_outputs=True,
)  # fmt: skip
TABLE = Hint(
    "table", False, _NEST, _ALL, Changes.MEANING,
    ("ir.nest.loops",),
    "One launch runs the nest for each row of a table of arguments.", given_by="lowering",
)  # fmt: skip

# --- kernels of GPUs --------------------------------------------------------------------------------------------------

NUM_WARPS = Hint(
    "num_warps", 4, _NEST, _GPU, Changes.ORDER,
    ("codegen.triton.emit", "codegen.triton.reduce", "codegen.triton.values", "dynamo_backend.reports.traffic"),
    "Warps over which a program's tiles are laid.", choices=(1, 2, 4, 8, 16, 32),
)  # fmt: skip
RESIDENT = Hint(
    "resident", 0, _NEST, _GPU, Changes.SPEED, ("codegen.triton.emit", "dynamo_backend.reports.traffic"),
    "Programs whose registers a multiprocessor is to hold at a time: a thread may use its share and no more, with 0 as "
    "many as the compiler likes.",
    high=32,
)  # fmt: skip
NUM_STAGES = Hint(
    "num_stages", 1, (Place.NEST, Place.LOOP), _GPU, Changes.SPEED,
    ("codegen.triton.emit", "scheduler.rules.gpu.steps"),
    "Iterations whose loads are in flight at once: of one loop, or of those that Triton pipelines by itself.",
    low=1, high=8,
    kinds=(LoopKind.SERIAL,),
)  # fmt: skip
PEEL = Hint(
    "peel", False, _NEST, _GPU, Changes.SPEED, ("codegen.triton.emit",),
    "Programs that no tail touches run without masks.",
)  # fmt: skip
NARROW_ROWS = Hint(
    "narrow_rows", False, _NEST, _GPU, Changes.SPEED,
    ("codegen.triton.emit", "codegen.triton.program", "codegen.triton.reduce", "codegen.triton.values",
     "dynamo_backend.reports.traffic"),
    "Every unrolled loop is one visit of a row, written out. Visits keep half types of a row in registers as they were "
    "loaded, and nothing that was made of them. Of a part that a thread loads at once it sums up what it has.",
)  # fmt: skip
DESCRIPTOR = Hint(
    "descriptor", False, _NEST, _GPU, Changes.SPEED, ("codegen.triton.products.descriptors",),
    "Tiles of a product's operand may be copied by the tensor memory accelerator.", of_buffer=True,
)  # fmt: skip
TRANSPOSED = Hint(
    "transposed", False, _NEST, _GPU, Changes.SPEED, ("codegen.triton.products.descriptors", "codegen.triton.values"),
    "A tile of a parameter that two products of an iteration read in both orientations is loaded for the first, and "
    "transposed for the second.",
    of_buffer=True,
)  # fmt: skip
EVICT = Hint(
    "evict", "", (Place.NEST, Place.BLOCK), _GPU, Changes.SPEED,
    ("codegen.triton.values", "dynamo_backend.reports.traffic"),
    "How long the caches keep what is loaded of a parameter.",
    choices=("evict_first", "evict_last"), of_buffer=True,
)  # fmt: skip
EARLY = Hint(
    "early", False, _NEST, _GPU, Changes.SPEED, ("codegen.triton.emit",),
    "What a program loads of a parameter in tiles it loads before it computes anything: it is on its way meanwhile.",
    of_buffer=True,
)  # fmt: skip
APART = Hint(
    "apart", False, _LOOP, _GPU, Changes.SPEED, ("codegen.triton.program",),
    "An unrolled loop is written out: its iterations share what they load alike, and where it does not reduce each has "
    "results of its own.",
    kinds=(LoopKind.UNROLLED,),
)  # fmt: skip
COLUMN_PARTS = Hint(
    "column_parts", 1, _NEST, _GPU, Changes.SPEED, ("codegen.triton.products.column_parts",),
    "What follows a tensorized block is done for so many parts of its columns, one after the other.", choices=(1, 2, 4),
)  # fmt: skip
FLATTEN = Hint(
    "flatten", False, _LOOP, _GPU, Changes.SPEED, ("codegen.triton.emit",),
    "The loop becomes one with the loop inside it, and the pipeline goes on from one iteration to the next.",
    kinds=(LoopKind.SERIAL,),
)  # fmt: skip
WARP_SPECIALIZE = Hint(
    "warp_specialize", False, _LOOP, _GPU, Changes.SPEED, ("codegen.triton.emit",),
    "Warps take parts of the loop's body.",
    kinds=(LoopKind.SERIAL,),
)  # fmt: skip
FULL_TILES = Hint(
    "full_tiles", False, _LOOP, _GPU, Changes.ORDER, ("codegen.triton.emit",),
    "Iterations in which masks of positions and tails are decided for all lanes run in a loop of their own, without "
    "them, ahead of the others.",
    kinds=(LoopKind.SERIAL,),
)  # fmt: skip
LIVE_FROM = Hint(
    "live_from", "", _BLOCK, _ALL, Changes.SPEED, ("ir.nest.live",),
    "The block does nothing in iterations of a loop before the number in a local buffer where that loop begins.",
    given_by="decompose_online", of_locals=True,
)  # fmt: skip
LIVE_TO = Hint(
    "live_to", "", _BLOCK, _ALL, Changes.SPEED, ("ir.nest.live",),
    "The block does nothing in iterations of a loop from the number in a local buffer on, where that loop begins.",
    given_by="decompose_online", of_locals=True,
)  # fmt: skip
DATA_ENDS = Hint(
    "data_ends", False, _LOOP, _GPU, Changes.SPEED, ("codegen.triton.emit",),
    "The loop ends behind the last element that data say counts for a lane of the tile.",
    kinds=(LoopKind.SERIAL,),
)  # fmt: skip
TENSORIZE = Hint(
    "tensorize", "", _BLOCK, _ALL, Changes.ORDER,
    ("codegen.triton.program", "codegen.llvm.gemm", "codegen.llvm.dots", "codegen.llvm.reductions.integers",
     "scheduler.primitives.loops.tensorize"),
    "The instruction, or the function of a library, that computes the block's tile.", choices=("dot", "gemm"),
    others=DOTS, given_by="tensorize",
)  # fmt: skip
OPERANDS = Hint(
    "operands", "", _BLOCK, _GPU, Changes.ROUNDING, ("codegen.triton.products.dot",),
    "The element type to which both operands of a tensorized block are rounded; by default that in which they come.",
    choices=("float16", "bfloat16", "float32", "int8"),
)  # fmt: skip
INPUT_PRECISION = Hint(
    "input_precision", "ieee", _BLOCK, _GPU, Changes.ROUNDING, ("codegen.triton.products.dot",),
    "How a tensorized block multiplies float32.", choices=("ieee", "tf32", "tf32x3"),
)  # fmt: skip
ATOMIC = Hint(
    "atomic", False, _BLOCK, _GPU, Changes.ORDER,
    ("codegen.triton.scatter", "scheduler.primitives.analysis.dependence"),
    "The block scatters by atomic operations, in any order.", given_by="atomic",
)  # fmt: skip

# --- kernels of CPUs --------------------------------------------------------------------------------------------------

GRAIN = Hint(
    "grain", 1 << 15, _LOOP, _CPU, Changes.SPEED, ("codegen.llvm.module",),
    "Elements of work below which a parallel loop runs on one thread.",
    kinds=(LoopKind.PARALLEL,),
)  # fmt: skip
CASCADE = Hint(
    "cascade", False, _LOOP, _CPU, Changes.ORDER,
    ("codegen.llvm.loops", "codegen.llvm.reductions.integers", "codegen.llvm.reductions.reductions",
     "scheduler.primitives.analysis.dots",
     "scheduler.rules.cpu.contraction", "scheduler.tuning.order"),
    "Reductions sum this loop by itself before they add it to what is outside: shorter sums, smaller errors.",
    kinds=_IN_A_THREAD,
)  # fmt: skip
HOLD = Hint(
    "hold", False, _LOOP, _CPU, Changes.SPEED, ("codegen.llvm.loops",),
    "Reductions keep in registers what this loop updates, where it is one of many.",
    kinds=_IN_A_THREAD,
)  # fmt: skip
CHAIN = Hint(
    "chain", False, _LOOP, _CPU, Changes.ORDER, ("codegen.llvm.reductions.reductions", "scheduler.tuning.order"),
    "The copies of an unrolled loop share one partial state.",
    kinds=(LoopKind.UNROLLED,),
)  # fmt: skip
FACTOR = Hint(
    "factor", False, _LOOP, _CPU, Changes.ROUNDING, ("codegen.llvm.reductions.factor",),
    "Factors that all terms of a sum have in common multiply the sum.",
    kinds=_IN_A_THREAD,
)  # fmt: skip
PREFETCH = Hint(
    "prefetch", 0, _LOOP, _CPU, Changes.SPEED, ("codegen.llvm.loops", "scheduler.rules.cpu.prefetch"),
    "So many bytes ahead of what vectors read is fetched; 0 for nothing.",
    kinds=(LoopKind.PARALLEL, *_IN_A_THREAD),
)  # fmt: skip
PREFETCH_STORES = Hint(
    "prefetch_stores", 0, _LOOP, _CPU, Changes.SPEED, ("codegen.llvm.loops",),
    "So many bytes ahead of what vectors write is fetched; 0 for nothing.",
    kinds=(LoopKind.PARALLEL, *_IN_A_THREAD),
)  # fmt: skip
UNIT = Hint(
    "unit", False, _LOOP, _ALL, Changes.SPEED, ("scheduler.primitives.loops.blockize",),
    "Primitives move the loop with all that is in it, and do not enter.", given_by="blockize",
    kinds=tuple(LoopKind),
)  # fmt: skip

HINTS: dict[str, Hint[Any]] = {h.name: h for h in tuple(globals().values()) if isinstance(h, Hint)}


# --- what is wrong with an annotation ---------------------------------------------------------------------------------


def misfit(key: object, value: object, place: Place, kind: LoopKind | None = None) -> tuple[str, str] | None:
    """What is wrong with an annotation wherever it stands in a place of that kind, and how to mend it; ``kind`` is that
    of a loop."""
    name, colon, buffer = str(key).partition(":")
    hint = HINTS.get(name)
    if hint is None:
        here = [h.name for h in HINTS.values() if place in h.places]
        return f"there is no hint {name!r}", _near(name, HINTS) or f"a {place.value} has {', '.join(here)}"
    if place not in hint.places:
        allowed = " or a ".join(p.value for p in hint.places)
        return f"{name!r} is no hint of a {place.value}", f"it is one of a {allowed}"
    if hint.of_buffer != bool(colon and buffer):
        form = f"{name}:parameter" if hint.of_buffer else name
        return f"{key!r} is not how the hint {name!r} is written", f"write {form!r}"
    if not hint.takes(value):
        near = hint.nearest(value)
        return f"{name!r} cannot be {value!r}", f"{f'did you mean {near}? ' if near else ''}it takes {hint.values}"
    if kind is not None and kind not in hint.kinds:
        allowed = " or ".join(k.value for k in hint.kinds)
        return f"{name!r} says nothing on a {kind.value} loop", f"it may stand on one that is {allowed}"
    return None


def misfits(
    annotations: Annotations,
    place: Place,
    parameters: Collection[str],
    outputs: Collection[str],
    kind: LoopKind | None = None,
) -> Iterator[tuple[str, str]]:
    """All that is wrong with the annotations of a place in a nest of such parameters and outputs."""
    for key, value in annotations:
        wrong = misfit(key, value, place, kind)
        if wrong is not None:
            yield wrong
            continue
        name, _, buffer = key.partition(":")
        asked = {buffer} if HINTS[name].of_buffer else set()
        known = parameters
        if HINTS[name].of_outputs:
            asked, known = set(str(value).split(",")), outputs
        for missing in sorted(asked.difference(known)):
            what = "output" if known is outputs else "parameter"
            mend = _near(missing, known) or f"there are {', '.join(known)}"
            yield f"{key!r} speaks of {missing!r}, which is no {what}", mend


def foreign(annotations: Annotations, target: str) -> Iterator[str]:
    """Those of which a kernel for a kind of target ("cpu", "gpu") would take no notice."""
    for key, _ in annotations:
        hint = HINTS.get(key.partition(":")[0])
        if hint is None or target not in hint.targets:
            yield key


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
