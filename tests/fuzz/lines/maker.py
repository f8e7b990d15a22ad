"""Builds a program line by line. Every line is run as it is added, by eager and in double precision, at all sizes of
the program at once; what eager refuses, or what its documents leave undefined, does not get in.

A value is *exact* where nothing was rounded on the way to it: its steps round nothing as such, and eager's bits equal
double precision's. Only exact values are compared, rounded to whole numbers, sorted or turned into positions, because a
last bit decides there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ...settings import default_dtype
from ..program import Input, Program, Sizes, Step, mentioned
from ..run import code_of, execute, inputs_of
from ..values import namespace
from .bounds import eps_of, scores_fit, share_memory

# Dimensions of a tensor at most, and the largest number in a program that has no infinities.
DIMENSIONS, LARGEST = 5, 1e4
INPUTS = 7
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Of which eager knows so few operations that most of the maker leaves them alone.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
KINDS = (*FLOATS, *INTEGERS, *UNSIGNED, torch.bool, torch.complex64)


class NoFit(Exception):
    """Nothing in the program is what an operation needs."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A line to be: ``text`` is its right-hand side, or the statement of a write, which may have results too. ``exact``
    says that the operation as such rounds nothing where its operands are small multiples of a power of two; ``eps`` is
    the relative rounding inside it, where that is more than its results' types have.
    """

    text: str
    operands: tuple[str, ...]
    results: int = 1
    kind: Literal["compute", "view", "write"] = "compute"
    exact: bool = False
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Info:
    """What is known of a value at all sizes; ``low`` and ``high`` bound its finite elements."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    exact: bool
    finite: bool
    low: float
    high: float

    @property
    def ndim(self) -> int:
        return len(self.shapes[0])

    @property
    def elements(self) -> int:
        return max(math.prod(s) for s in self.shapes)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    @property
    def is_bool(self) -> bool:
        return self.dtype is torch.bool

    @property
    def sure(self) -> bool:
        """Whether discontinuous operations may read it."""
        return self.exact or not self.is_float

    def within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high and self.finite

    def extents(self, dim: int) -> tuple[int, ...]:
        return tuple(s[dim] for s in self.shapes)

    def has(self, dim: int, least: int = 1) -> bool:
        """Whether a dimension has so many elements at all sizes."""
        return min(self.extents(dim)) >= least


Test: TypeAlias = "Callable[[Info], bool]"


def floats_within(bound: float) -> Test:
    """Whether a value is one of floats that are finite, none of them larger than that."""
    return lambda i: i.is_float and i.within(-bound, bound)


@dataclass(slots=True)
class Maker:
    """``spaces``: for each choice of sizes, the values of all names by eager and in double precision. ``elements``:
    what a tensor has at most.
    """

    seed: int
    rng: random.Random
    sizes: tuple[Sizes, ...]
    dynamic: bool | None
    gradient: bool
    special: bool
    elements: int = 6000
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    spaces: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    exact: dict[str, bool] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    made: int = 0
    # Inputs that are plain numbers.
    plain: list[str] = field(default_factory=list)
    _infos: dict[str, Info] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spaces = [(namespace(), namespace(wide=True)) for _ in self.sizes]

    # --- choosing operands --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Tensors that there are, in the order in which they were made."""
        return list(self.exact)

    def info(self, name: str) -> Info:
        known = self._infos.get(name)
        if known is None:
            known = self._infos[name] = self._measure(name)
        return known

    def _measure(self, name: str) -> Info:
        tensors = [eager[name].detach() for eager, _ in self.spaces]
        low, high, finite = math.inf, -math.inf, True
        for t in tensors:
            if not t.numel():
                continue
            t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
            wide = t.double()
            finite &= bool(wide.isfinite().all())
            wide = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            low, high = min(low, float(wide.min())), max(high, float(wide.max()))
        if low > high:
            low = high = 0.0
        shapes = tuple(tuple(t.shape) for t in tensors)
        return Info(name, tensors[0].dtype, shapes, self.exact[name], finite, low, high)

    def pick(self, *tests: Test) -> Info:
        """A value that passes all tests; later ones and unread ones come more often. Raises NoFit."""
        found = [i for i in map(self.info, self.names) if all(test(i) for test in tests)]
        if not found:
            raise NoFit
        weights = [(1 + k) * (1 if i.name in self.used else 3) for k, i in enumerate(found)]
        return self.rng.choices(found, weights)[0]

    def dim(self, a: Info, *, least: int = 0) -> int:
        """A dimension of a value, counted from either end. Raises NoFit."""
        found = [d for d in range(a.ndim) if a.has(d, least)]
        if not found:
            raise NoFit
        d = self.rng.choice(found)
        return d - a.ndim if self.rng.random() < 0.5 else d

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # --- inputs -------------------------------------------------------------------------------------------------------

    def extent(self, extents: Sequence[int]) -> str:
        """Text for a size of an input, from what it is at each choice of sizes. Raises NoFit."""
        names = [n for n in self.sizes[0] if tuple(s[n] for s in self.sizes) == tuple(extents)]
        if names:
            return self.rng.choice(names)
        if len(set(extents)) > 1:
            raise NoFit
        return str(extents[0])

    def fresh(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, kind: str = "eighths", *, constant: bool = False
    ) -> Info:
        """A new input of these shapes, laid out in some way; no gradient is asked for a ``constant``. Raises NoFit."""
        if any(math.prod(s) > self.elements for s in shapes):
            raise NoFit
        parts = [self.extent([s[d] for s in shapes]) for d in range(len(shapes[0]))]
        text = self._laid_out(parts, dtype, kind)
        marked = [str(d) for d, p in enumerate(parts) if p in self.sizes[0]]
        if self.dynamic is None and marked and self.chance(0.2):
            text = f"varied({text}, {', '.join(marked)})"
        return self.input(text, dtype, constant=constant)

    def fresh_places(self, shapes: Sequence[Sequence[int]], bounds: Sequence[int], dtype: torch.dtype) -> Info:
        """A new input of positions below a size."""
        if min(bounds) < 1:
            raise NoFit
        parts = [self.extent([s[d] for s in shapes]) for d in range(len(shapes[0]))]
        text = f"places(({''.join(p + ', ' for p in parts)}), {self.extent(bounds)}, {self._data()}, {dtype})"
        return self.input(text, dtype)

    def fresh_order(self, extents: Sequence[int]) -> Info:
        """A new input of the positions of a dimension, each once."""
        return self.input(f"order({self.extent(extents)}, {self._data()})", torch.int64)

    def _data(self) -> int:
        return self.seed * 100 + len(self.inputs)

    def _laid_out(self, parts: list[str], dtype: torch.dtype, kind: str) -> str:
        rng, n = self.rng, len(parts)
        end = f", {dtype}, {self._data()}" + (f', "{kind}")' if kind != "eighths" else ")")

        def numbers(shape: Sequence[str]) -> str:
            return f"numbers(({''.join(p + ', ' for p in shape)}){end}"

        form = rng.random()
        if form < 0.55 or not n:
            return numbers(parts)
        if form < 0.70 and n > 1:
            order = list(range(n))
            rng.shuffle(order)
            inverse = tuple(order.index(k) for k in range(n))
            return f"{numbers([parts[k] for k in order])}.permute({inverse})"
        d = rng.randrange(n)
        here = ":, " * d
        if form < 0.80:
            return f"{numbers([*parts[:d], f'2 * {parts[d]}', *parts[d + 1 :]])}[{here}::2]"
        if form < 0.90:
            return f"{numbers([*parts[:d], f'{parts[d]} + 3', *parts[d + 1 :]])}[{here}1:{parts[d]} + 1]"
        if form < 0.96:
            return f"{numbers([*parts[:d], '1', *parts[d + 1 :]])}.expand({', '.join(parts)})"
        return f"{numbers(parts)}.contiguous(memory_format=torch.channels_last)" if n == 4 else numbers(parts)

    def input(self, text: str, dtype: torch.dtype, *, constant: bool = False) -> Info:
        """A new input. Raises NoFit where its text cannot be run, or where there are many."""
        if len(self.inputs) >= INPUTS:
            raise NoFit
        grad = self.gradient and dtype.is_floating_point and not constant and self.chance(0.85)
        made = Input(f"x{len(self.inputs)}", text, grad)
        alone = Program(self.seed, (made,), (), (), self.sizes, gradient=self.gradient)
        if any(i.name in text for i in self.inputs):
            alone = Program(self.seed, (*self.inputs, made), (), (), self.sizes, gradient=self.gradient)
        try:
            tensors = [[inputs_of(alone, s, wide=w)[-1] for w in (False, True)] for s in self.sizes]
        except RuntimeError as error:
            raise NoFit from error
        if any(t.numel() > self.elements for pair in tensors for t in pair):
            raise NoFit
        self.inputs.append(made)
        for space, pair in zip(self.spaces, tensors, strict=True):
            for names, t in zip(space, pair, strict=True):
                names[made.name] = t
        self.exact[made.name] = True
        if len(alone.inputs) > 1:  # it may share the memory of another
            self._replay()
        return self.info(made.name)

    def plain_number(self, texts: Sequence[str]) -> str:
        """A number of one of these texts over the sizes: an input that there is, or a new one. Raises NoFit."""
        known = [i.name for i in self.inputs if i.name in self.plain and i.text in texts]
        if known and self.chance(0.4):
            return self.rng.choice(known)
        if len(self.inputs) >= INPUTS:
            raise NoFit
        made = Input(f"x{len(self.inputs)}", self.rng.choice(texts))
        self.inputs.append(made)
        self.plain.append(made.name)
        for sizes, space in zip(self.sizes, self.spaces, strict=True):
            for names in space:
                names[made.name] = eval(made.text, dict(sizes))
        return made.name

    def draft(self, text: str, **settings: Any) -> Draft:
        """A line that reads all the tensors that it names."""
        return Draft(text, mentioned(text, self.names), **settings)

    def choose(self, texts: Sequence[str], *, exact: bool = False, **values: Info | str) -> Draft:
        """One of these lines; values stand in them by their names in braces."""
        text, names = self.rng.choice(texts), {k: v.name if isinstance(v, Info) else v for k, v in values.items()}
        return self.draft(text.format(**names) if values else text, exact=exact)

    def write(self, texts: Sequence[str], t: Info, *, exact: bool = True) -> Draft:
        """One of these statements, each of which writes to ``{t}``."""
        return Draft(self.rng.choice(texts).format(t=t.name), (t.name,), 0, "write", exact)

    # --- adding lines -------------------------------------------------------------------------------------------------

    def add(self, draft: Draft) -> bool:
        """Add a line, if it can be run and is defined."""
        results = tuple(f"t{self.made + k}" for k in range(draft.results))
        operands = (*draft.operands, *mentioned(draft.text, self.plain))
        step = Step(draft.text, results, operands, draft.kind)
        if draft.kind == "write" and self._overlaps(draft.operands[0]):
            return False  # eager may refuse that, and says so only where it is easily seen
        if not scores_fit(draft.text, [self.info(o).shapes for o in draft.operands if o in self.exact]):
            return False
        try:
            for eager, wide in self.spaces:
                self._both(step, eager, wide)
            if not self._defined(step):
                raise NoFit
        except Exception:
            self._undo(step)
            return False
        self.made += len(results)
        changed = self._changed(step)
        operands_exact = all(self.exact[o] for o in draft.operands)
        for name in changed:
            self._infos.pop(name, None)
            sure = (draft.exact or step.kind == "view") and operands_exact and self.exact.get(name, True)
            self.exact[name] = sure and self._equal(name)
        self.used.update(step.operands)
        exact = all(self.exact[name] for name in changed)
        self.steps.append(
            Step(
                step.text,
                results,
                step.operands,
                step.kind,
                max(draft.eps, self._eps((*changed, *draft.operands)), eps_of(step.text)),
                exact,
            )
        )
        return True

    def _both(self, step: Step, eager: dict[str, Any], wide: dict[str, Any]) -> None:
        with torch.set_grad_enabled(self.gradient):
            torch.manual_seed(len(self.steps))
            exec(code_of(step, wide=False), eager)
            torch.manual_seed(len(self.steps))
            with default_dtype(torch.float64):
                execute(step, wide)

    def _undo(self, step: Step) -> None:
        for eager, wide in self.spaces:
            for name in step.results:
                eager.pop(name, None)
                wide.pop(name, None)
        if step.kind == "write":  # it may have written half of it
            self._replay()

    def _replay(self) -> None:
        program = Program(self.seed, tuple(self.inputs), (), (), self.sizes, gradient=self.gradient)
        for sizes, (eager, wide) in zip(self.sizes, self.spaces, strict=True):
            names = [i.name for i in self.inputs]
            eager.update(zip(names, inputs_of(program, sizes), strict=True))
            wide.update(zip(names, inputs_of(program, sizes, wide=True), strict=True))
            steps, self.steps = self.steps, []
            for step in steps:
                self._both(step, eager, wide)
                self.steps.append(step)

    def _changed(self, step: Step) -> list[str]:
        """What a line makes or writes."""
        written = self._aliases(step.operands[0]) if step.kind == "write" else []
        return [*written, *step.results]

    def _aliases(self, name: str) -> list[str]:
        found = [name]
        for eager, _ in self.spaces:
            memory = eager[name].untyped_storage().data_ptr()
            found += [n for n in self.names if memory and eager[n].untyped_storage().data_ptr() == memory]
        return list(dict.fromkeys(found))

    def _overlaps(self, name: str) -> bool:
        """Whether elements of a value, or of an input whose memory it lies in, share memory."""
        shared = {name, *(i.name for i in self.inputs if i.name in self._aliases(name))}
        return any(share_memory(eager[n]) for eager, _ in self.spaces for n in shared)

    def shares_input(self, name: str) -> bool:
        """Whether a value lies in the memory of an input."""
        return any(i.name in self._aliases(name) for i in self.inputs)

    def _defined(self, step: Step) -> bool:
        """Whether results are tensors of moderate size, and small numbers where the program has no infinities."""
        changed = self._changed(step)
        if any(len({getattr(eager[name], "ndim", None) for eager, _ in self.spaces}) > 1 for name in changed):
            return False
        for eager, wide in self.spaces:
            for name in changed:
                t, w = eager[name], wide[name]
                if not isinstance(t, Tensor) or t.numel() > self.elements or t.ndim > DIMENSIONS:
                    return False
                if t.shape != w.shape or t.dtype not in KINDS:
                    return False
                if not (t.is_floating_point() or t.is_complex()) or not t.numel():
                    continue
                values = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().double()
                largest = LARGEST if t.dtype is not torch.float16 else 1000.0
                if not self.special and not bool((values.abs() <= largest).all()):
                    return False
        return True

    def _equal(self, name: str) -> bool:
        for eager, wide in self.spaces:
            t, w = eager[name].detach(), wide[name].detach()
            if not torch.equal(t.to(w.dtype).nan_to_num(nan=12345.0), w.nan_to_num(nan=12345.0)):
                return False
        return True

    def _eps(self, names: Sequence[str]) -> float:
        kinds = {self.info(n).dtype for n in names}
        return max((float(torch.finfo(k).eps) for k in kinds if k.is_floating_point or k.is_complex), default=0.0)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def program(self, returns: tuple[str, ...], **settings: Any) -> Program:
        return Program(
            self.seed, tuple(self.inputs), tuple(self.steps), returns, self.sizes, self.dynamic, self.gradient,
                **settings
        )  # fmt: skip
