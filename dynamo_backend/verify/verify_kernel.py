"""``MLC_VERIFY=1``: a kernel that was just built runs on small awkward sizes, and is compared with the oracle.

Sizes that are symbols are zero, one, primes, and those around the tiles of the schedule; kernels of fixed sizes run at
those. Memory lies odd where a kernel promises to take it so, with poison around what may be written. Where a size is
too large for the oracle the function's ATen ops are what is compared with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from ...ir.errors import MlcError, OutOfRangeError
from ...ir.expr.symbols import Size
from ...ir.expr.value import Load, is_value
from ...ir.function.function import Callee
from ...ir.graph.graph import Origin
from ...ir.nest.loops import Access, AxisKind, Buffer, LoopNest, Update, blocks, walk_nodes
from ...ir.oracle.oracle import poison, run_nest, size
from ...ir.verify.expr import exact_range, parts
from ...runtime.compile.fallback import AtenKernel
from ...runtime.tuning.measure import index_limits
from .roundings import Roundings
from .verify_graph import TOLERANCE, Difference, WrongResultError, difference, distance, moved, settled

Sizes = Mapping[str, int]
# Points of the domain up to which the oracle is asked, and beyond which nobody is.
ORACLE_POINTS, MOST_POINTS = 20_000, 1 << 24
# Elements from the first of a buffer to its last beyond which it is not made: strides may be products of sizes.
MOST_SPAN = 1 << 26
# Terms of one sum beyond which its order decides the digits: one after the other in float32 4,000,000 err by .4 %.
# Sizes of symbols stay below; fixed ones are all there is.
MOST_TERMS = 1 << 20
# Sizes that any kernel may be wrong at, and that of the other symbols while one is tried.
AWKWARD, BASE = (0, 1, 2, 3, 7, 13), 5
# Runs of one kernel at most; tiles beyond this are those of static sizes.
MOST_RUNS, MOST_TILE = 24, 1024
# Elements around what a kernel may write.
MARGIN = 64
# The share of the tolerance by which inputs are moved to see how sure a result is.
MOVED = 1e-3
# Runs whose operations round otherwise, for the same.
ROUNDED = 4


def verify_kernel(
    function: Callee,
    nest: LoopNest,
    scheduled: LoopNest,
    call: Callable[[Sequence[Sequence[Tensor]], Sequence[Sizes]], float],
    device: str,
    origins: Sequence[Origin] = (),
    affords: Callable[[Sizes], bool] = lambda sizes: True,
) -> int:
    """Run a kernel, compare its results with what ``nest`` means, and return how many runs were compared.

    ``call`` runs it on rows of tensors, each those of one call in the order of the nest's parameters, and their sizes;
    one row unless the function is over a table. It returns the share of the kernel that ran: where that is less than 1
    what was written is compared, where it is 0 nothing is. Sizes that ``affords`` refuses, since they would take too
    long where ``call`` is slow, are left out. Raises WrongResultError, which names kernel, index and both values.
    """
    done = 0
    tried = sizes_to_try(nest, scheduled)
    possible = (_possible(function, nest, s, k, device) for k, s in enumerate(tried) if affords(s))
    trials = (t for t in possible if t is not None)
    for row in itertools.islice(trials, MOST_RUNS):
        rows = [row, row.again(device)] if function.table else [row]
        try:
            share = call([list(r.tensors.values()) for r in rows], [r.sizes for r in rows])
        except MlcError as error:
            # ATen's ops read what is beside, so that nobody can tell.
            if isinstance(error, OutOfRangeError) and not _by_oracle(nest, row.sizes):
                continue
            raise WrongResultError(
                f"{_what(function, row.sizes, origins)} raises {error}; its definition does not"
            ) from error
        if not share:
            continue
        for r in rows:
            found = r.fault(function, nest, whole=share == 1)
            if found is not None:
                raise WrongResultError(
                    f"{_what(function, r.sizes, origins)} differs from its definition: {found}.\n"
                    "torch_mlc.explain shows its loops, schedule and source; MLC_DUMP_DIR writes them down."
                )
        done += 1
    return done


def sizes_to_try(nest: LoopNest, scheduled: LoopNest) -> Iterator[dict[str, int]]:
    """Values of the size symbols: all alike, then one after the other among others of a usual size."""
    symbols = nest.symbols.sizes
    if not symbols:
        yield {}
        return
    tiles = {t + d for t in tiles_of(scheduled) for d in (-1, 0, 1)}
    values = [*AWKWARD, *sorted(tiles - set(AWKWARD))]
    seen = set()
    alike = ([_allowed(s, v) for s in symbols] for v in values)
    single = ([_allowed(s, v if s is one else BASE) for s in symbols] for v in values for one in symbols)
    for chosen in itertools.chain(alike, single):
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield {s.symbol.name: v for s, v in zip(symbols, chosen, strict=True)}


def tiles_of(nest: LoopNest) -> set[int]:
    """Iterations of loops of fixed extent, and of those inside one another together."""
    found = set()
    for node, outer in walk_nodes(nest.body):
        extents = [lp.extent for lp in (*outer, node) if hasattr(lp, "extent")]
        total = 1
        for extent in reversed(extents):
            if not extent.is_Integer:
                break
            total *= int(extent)
            if 1 < total <= MOST_TILE:
                found.add(total)
    return found


def passed(nest: LoopNest) -> dict[str, set[torch.dtype]]:
    """Types that each buffer's values pass through on their way from the nest's inputs: a result of float64 may be
    made of a sigmoid in float32."""
    kinds = {name: {b.dtype.torch} for name, b in nest.buffers.items()}
    made_of: dict[str, set[str]] = {}
    for block, _ in blocks(nest):
        for s in block.body:
            targets = s.targets if isinstance(s, Update) else (Access(s.buffer, s.indices),)
            for target in targets:
                values = (*(s.values if isinstance(s, Update) else (s.value,)), *filter(is_value, target.indices))
                inside = [e for v in values for e, _ in parts(v)]
                kinds[target.buffer] |= {e.dtype.torch for e in inside}
                made_of.setdefault(target.buffer, set()).update(e.buffer for e in inside if isinstance(e, Load))
    grown = True
    while grown:
        before = {name: len(k) for name, k in kinds.items()}
        for name, sources in made_of.items():
            kinds[name].update(*(kinds[source] for source in sources))
        grown = any(len(k) > before[name] for name, k in kinds.items())
    return kinds


def _allowed(s: Size, value: int) -> int:
    """The least value of a symbol from ``value`` on, or its greatest."""
    value = max(value, s.lower)
    value = -(-value // s.divisor) * s.divisor
    return value if s.upper is None or value <= s.upper else s.upper // s.divisor * s.divisor


@dataclass(frozen=True, slots=True)
class _Trial:
    """Arguments of one run, and what it should give. ``storage`` is the memory of each tensor with what is around."""

    sizes: Sizes
    tensors: dict[str, Tensor]
    storage: dict[str, Tensor]
    before: dict[str, Tensor]
    wanted: dict[str, Tensor]

    def again(self, device: str) -> _Trial:
        """The same in other memory: the second row of a table."""
        storage = {name: flat.clone() for name, flat in self.before.items()}
        tensors = {
            name: torch.as_strided(storage[name], t.size(), t.stride(), t.storage_offset())
            for name, t in self.tensors.items()
        }
        return _Trial(self.sizes, tensors, storage, self.before, self.wanted)

    def fault(self, function: Callee, nest: LoopNest, *, whole: bool = True) -> Difference | str | None:
        """What is wrong after the run, which was of the ``whole`` kernel or wrote but some elements."""
        tolerances = {name: max((TOLERANCE.get(t, 0.0) for t in k), default=0.0) for name, k in passed(nest).items()}
        most = max((tolerances[name] for name in self.wanted), default=0.0)
        others: list[Mapping[str, Tensor]] | None = None
        for name, want in self.wanted.items():
            tolerance = tolerances[name]
            got = self.tensors[name] if whole else self._with_written(name, want)
            found = difference(name, got, want, tolerance)
            if found is not None and tolerance:
                others = self.others(function, nest, most) if others is None else others
                like = [t[name] for t in others if name in t]
                unsure = max((distance(want, t) for t in like), default=0.0)
                found = difference(name, settled(got, want, like), want, tolerance, unsure)
            if found is not None:
                return found
        for name, flat in self.storage.items():
            after = flat.clone()
            if name in self.wanted:  # its elements are as they should be
                t = self.tensors[name]
                earlier = torch.as_strided(self.before[name], t.size(), t.stride(), t.storage_offset())
                torch.as_strided(after, t.size(), t.stride(), t.storage_offset()).copy_(earlier)
            other = (_raw(after) != _raw(self.before[name])).any(-1)
            if other.any():
                at = int(other.nonzero()[0]) - self.tensors[name].storage_offset()
                return f"memory at {at} elements from the first of {name} was written, which is none of its elements"
        return None

    def _with_written(self, name: str, want: Tensor) -> Tensor:
        """What is wanted of an output, with those elements in their place that changed."""
        t, flat = self.tensors[name], self.storage[name]
        changed = (_raw(flat) != _raw(self.before[name])).any(-1)
        return torch.where(torch.as_strided(changed, t.size(), t.stride(), t.storage_offset()), t, want)

    def others(self, function: Callee, nest: LoopNest, tolerance: float) -> list[Mapping[str, Tensor]]:
        """Results of inputs that are moved by a rounding, and some that are rounded otherwise on the way: how far they
        are from the wanted ones says how sure these are."""
        given = {
            name: torch.as_strided(self.before[name], t.size(), t.stride(), t.storage_offset())
            for name, t in self.tensors.items()
        }
        inputs = {b.name for b in nest.given}
        tensors = {
            name: moved(_strided_copy(t), tolerance * MOVED, k) if name in inputs else t
            for k, (name, t) in enumerate(given.items())
        }
        found: list[Mapping[str, Tensor]] = [_reference(function, nest, tensors, self.sizes)]
        # What cancels whatever the inputs are, as a mean of what has none, moves with the roundings on the way alone.
        for seed in range(ROUNDED):
            with Roundings(torch.Generator().manual_seed(seed)), suppress(NotImplementedError):
                found.append(_by_aten(function, nest, given, self.sizes))
        return found


def _possible(function: Callee, nest: LoopNest, sizes: Sizes, seed: int, device: str) -> _Trial | None:
    """Arguments at some sizes; None where there are none, or too many points."""
    try:
        return _trial(function, nest, sizes, seed, device)
    except ZeroDivisionError:  # by an extent that is at least one where the program runs
        return None


def _trial(function: Callee, nest: LoopNest, sizes: Sizes, seed: int, device: str) -> _Trial | None:
    """Arguments at some sizes; None where the function has no meaning there, or too many points."""
    if not 0 <= _points(nest, sizes) <= MOST_POINTS or not _fit(nest, sizes):
        return None
    if sizes and _terms(nest, sizes) > MOST_TERMS:
        return None
    limits = index_limits(nest, lambda e: size(e, sizes))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    storage: dict[str, Tensor] = {}
    for b in nest.params:
        shape, strides = ([size(e, sizes) for e in x] for x in (b.shape, b.strides))
        if min((*shape, *strides), default=0) < 0 or (b.name in nest.outputs and _overlaps(shape, strides)):
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        if span > MOST_SPAN:
            return None
        odd = seed % 2 if b.align <= b.dtype.itemsize else 0
        flat = _poisoned(b, span + 2 * MARGIN + odd).to(device)
        storage[b.name] = flat
        tensors[b.name] = torch.as_strided(flat, shape, strides, MARGIN + odd)
        if b in nest.given:
            if limits.get(b.name) == 0 and span:
                return None
            flat[MARGIN + odd : MARGIN + odd + span] = _values(b, span, limits.get(b.name), seed, generator).to(device)
    before = {name: flat.clone() for name, flat in storage.items()}
    try:
        wanted = _reference(function, nest, tensors, sizes)
    except MlcError:  # sizes that never come together, or indices made of data that nobody would give
        return None
    except NotImplementedError:  # ATen has few ops for wide unsigned integers, and the oracle is asked for small sizes
        return None
    return _Trial(sizes, tensors, storage, before, wanted)


def _fit(nest: LoopNest, sizes: Sizes) -> bool:
    """Whether what is always read exists: sizes that a guard ties to one another in a way that none of them can be
    told by do not come together as they are drawn. The oracle would raise; ATen ops read what is beside."""
    values = {s.symbol: sympy.Integer(sizes[s.symbol.name]) for s in nest.symbols.sizes}
    buffers = nest.buffers
    for block, _ in blocks(nest):
        ranges = {a.var: (0, size(a.extent, sizes) - 1) for a in block.axes}
        if block.predicate or any(last < 0 for _, last in ranges.values()):
            continue
        made = (v for s in block.body for v in (s.values if isinstance(s, Update) else (s.value,)))
        always = (e for v in made for e, guarded in parts(v) if isinstance(e, Load) and not guarded)
        for load in always:
            for index, extent in zip(load.indices, buffers[load.buffer].shape, strict=True):
                reached = None if is_value(index) else exact_range(index.xreplace(values), ranges)
                if reached is not None and not 0 <= reached[0] <= reached[1] < size(extent, sizes):
                    return False
    return True


def _reference(function: Callee, nest: LoopNest, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """What the results are: by the oracle where it is done soon, else by ATen ops."""
    if _by_oracle(nest, sizes):
        given = {b.name: _to_numpy(tensors[b.name], b) for b in nest.given}
        return {name: _to_torch(a, tensors[name]) for name, a in run_nest(nest, given, sizes).items()}
    return _by_aten(function, nest, tensors, sizes)


def _by_oracle(nest: LoopNest, sizes: Sizes) -> bool:
    """Whether the oracle is asked, which knows where an index is out of range."""
    return _points(nest, sizes) <= ORACLE_POINTS


def _points(nest: LoopNest, sizes: Sizes) -> int:
    """Points of the largest domain of a block; -1 where an extent is below zero."""
    extents = [[size(a.extent, sizes) for a in b.axes] for b, _ in blocks(nest)]
    return -1 if min((n for e in extents for n in e), default=0) < 0 else max(map(math.prod, extents), default=0)


def _terms(nest: LoopNest, sizes: Sizes) -> int:
    """Terms of the longest sum of floats."""
    sums = [
        b for b, _ in blocks(nest) if any(v.dtype.is_float for s in b.body if isinstance(s, Update) for v in s.values)
    ]
    return max((math.prod(size(a.extent, sizes) for a in b.axes_of(AxisKind.REDUCTION)) for b in sums), default=0)


def _by_aten(function: Callee, nest: LoopNest, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    if isinstance(function, LoopNest):
        raise NotImplementedError(f"{function.name} is loops, which ATen has no ops for")
    own = {name: _strided_copy(t) if name in nest.outputs else t for name, t in tensors.items()}
    symbols = [sizes[s.name] for s in function.symbols.symbols]
    AtenKernel(function).run(list(own.values()), symbols)
    return {name: own[name] for name in nest.outputs}


def _strided_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps and all; where elements share memory, one of its own for each."""
    if _overlaps(tensor.size(), tensor.stride()):
        return tensor.clone()
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


# --- memory -----------------------------------------------------------------------------------------------------------


def _values(b: Buffer, count: int, limit: int | None, seed: int, generator: torch.Generator) -> Tensor:
    """Elements of a buffer: indices that are in range, small whole numbers, or floats, every second time above zero."""
    kind = b.dtype.torch
    if kind is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not kind.is_floating_point:
        low, high = (0, max(limit, 1)) if limit is not None else (1, 120 if b.dtype.itemsize == 1 else 8)
        return torch.randint(low, high, (count,), generator=generator).to(kind)
    if seed % 3 == 1:
        return (torch.rand(count, generator=generator) + 0.1).to(kind)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(kind)


def _poisoned(b: Buffer, count: int) -> Tensor:
    flat = poison((count,), b.dtype)
    return torch.from_numpy(flat.view(np.uint8)).view(b.dtype.torch)


def _raw(flat: Tensor) -> Tensor:
    """Elements as rows of bytes, which compare where NaNs do not."""
    return flat.view(torch.uint8).reshape(flat.numel(), -1)


def _to_numpy(t: Tensor, b: Buffer) -> np.ndarray[Any, Any]:
    # A copy: one element is contiguous with any stride, but can only be seen as bytes with one of 1.
    flat = t.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    return flat.view(b.dtype.numpy).reshape(tuple(t.shape))


def _to_torch(a: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    if not a.size:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    flat = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat.copy()).view(like.dtype).reshape(like.shape).to(like.device)


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share memory: each stride has to step over all that is inside of it."""
    inside = 1
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < inside:
            return True
        inside = (n - 1) * stride + inside
    return False


def _what(function: Callee, sizes: Sizes, origins: Sequence[Origin]) -> str:
    ops = ", ".join(dict.fromkeys(o.op for o in origins))
    lines = "; ".join(dict.fromkeys(o.source for o in origins if o.source))
    at = ", ".join(f"{name} = {n}" for name, n in sizes.items())
    told = [f" of {ops}" if ops else "", f" ({lines})" if lines else "", f" at {at}" if at else ""]
    return f"kernel {function.name}{''.join(told)}"
