"""Which products a GPU computes with our loops, by a roofline model of its time.

cuBLAS multiplies a little faster than any loop of ours. What our loops save is memory traffic and launches: an operand
that is made on the way from something smaller need not be written and read again, and what follows a product runs on
its tiles while they are in registers. Reading the weights is nearly all of the time of few rows, multiplying that of
many. Where results are too few to give every multiprocessor a tile of them, the summed axis is cut into pieces; where
tiles are no multiple of the multiprocessors, the steps of all of them may be dealt evenly instead (``stream_k.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ....ir.expr.dtypes import DType
from ....ir.expr.value import IndexValue, index_exprs, walk
from ....ir.graph.graph import Compute, Reduction
from ....ir.machine import Machine
from ...facts.contraction import R0, Decision, LibraryProduct, Operand, StreamK
from ...facts.digits import DIVISIONS
from ..alignment import rates_left
from .gpu_tiles import (
    GROUP_ROWS,
    LEAST,
    PLAIN_SHAPES,
    SHAPES,
    VECTOR_SHAPES,
    Extent,
    Rates,
    TileShape,
    dealt_time,
    multiplying_time,
    reach,
)

# What our loops reach of the library's rates: multiplying half types, multiplying float32, and reading; and what is
# left of either where rows do not start at multiples of 16 bytes, so that elements are copied one by one.
OURS, OURS_PLAIN, OURS_READING, NARROW = 0.9, 0.6, 0.9, 0.4
# Operations of what makes an operand's elements, an instruction that is issued.
MAKING = 30 / 29.6
# Nanoseconds that a step of a program waits where it makes an operand that nobody packed: what it loads for that is not
# on its way before the last products are done. By the model of time, 64 steps of a GELU take 28 to 33 us longer.
STEP_WAIT = 450.0
# Nanoseconds until a program knows which rows it reads, where data say so; the next programs ask while others multiply.
LOOKUP_WAIT = 700.0
# Opening has to save this share of the time: the model is a model.
WORTH = 0.08
# And so much of it a sum in pieces, which needs a second kernel.
CUT_WORTH = 0.2
# Steps of a program's run, below which dealing them is no gain over pieces of one length.
LEAST_RUN = 8
# The rows or columns that share a tile of an operand.
TILE = 256
# Rows a multiprocessor of the matrix that a vector is multiplied with, below which it would have too little to read.
VECTOR_ROWS = 2
# Pieces of the summed axis: how many there may be, the least length of each, and what divides it.
MOST_PIECES, PIECE_DEPTH, STEP = 64, 512, 64


def decide_gpu(product: LibraryProduct, machine: Machine) -> Decision:
    """Open where what our loops need not read, write and launch is worth more than the library's higher rate, and
    always where no library may be called: then as the loops are fastest."""
    found = _decided(product, machine)
    if machine.calls_libraries:
        return found
    loops = found if found.decomposed or found.otherwise is None else found.otherwise
    sizes = f"{product.m} x {product.k} x {product.n}"
    reason = f"matrix product: {sizes} in loops, for no library may be called"
    return replace(loops, decomposed=True, reason=reason, loops=None, library=None, otherwise=None)


def _decided(product: LibraryProduct, machine: Machine) -> Decision:
    name = machine.libraries.products
    if _is_bytes(product):
        if DType.INT8 not in machine.in_kernels:
            return Decision(False, f"matrix product of bytes: {name}; kernels do not reach the tensor cores for it")
        if not all(_is_along(o, k) for o, k in ((product.a, -1), (product.b, -2))):
            return Decision(
                False, f"matrix product of bytes: {name}; tensor cores take rows that are contiguous in depth"
            )
    elif not product.type.dtype.is_float or product.type.dtype is DType.FLOAT64:
        return Decision(False, f"matrix product of {product.type.dtype.value}: the library")
    few = min(product.m, product.n)
    if product.k < LEAST or max(product.m, product.n) < LEAST:
        return Decision(False, f"matrix product: {name}; too small for tiles of the tensor cores")
    packed = product.a.is_packed, product.b.is_packed
    if few == 1 and not any(packed):
        return _with_vector(product, machine)
    library = _library_time(product, packed, machine)
    ours = _loop_time(product, packed, machine)
    if any(packed) and product.shared != (True, True):
        unpacked = _loop_time(product, (False, False), machine).later(_making_time(product, packed, machine))
        if unpacked.time < ours.time:
            packed, ours = (False, False), unpacked
    if not any(packed):
        product, packed, ours, apart = _with_prologues(product, ours, machine)
        library += apart
    sizes = f"{product.m} x {product.k} x {product.n}"
    what = _gain(product, packed, ours)
    opened, called = Decision(True, "", packed, ours.pieces, ours.stream_k), Decision(False, "")
    if ours.time < library * (1 - WORTH):
        taken, other = opened, called
        reason = f"{what}: {sizes} in {_time(ours.time)} rather than {_time(library)}"
    else:
        taken, other = called, opened
        reason = f"matrix product: {name} in {_time(library)}; in loops with {what} {_time(ours.time)}"
    other = replace(other, reason=reason)
    return replace(taken, reason=reason, loops=ours.time, library=library, otherwise=other)


def _with_prologues(
    p: LibraryProduct, ours: _Way, machine: Machine
) -> tuple[LibraryProduct, tuple[bool, bool], _Way, float]:
    """The product with the prologues that its loops do best with, if any, which of its operands they are, how it is
    done then, and nanoseconds that all of them take where others make them.

    An element is made anew for every tile of the results that reads it, so that many columns cost more instructions
    than bytes were saved; few rows wait for a matrix in the meantime.
    """
    able = tuple(o.prologue is not None and not shared for o, shared in zip((p.a, p.b), p.shared, strict=True))
    best = p, (False, False), ours
    for made in ((True, False), (False, True), (True, True)):
        if not all(can for can, wanted in zip(able, made, strict=True) if wanted):
            continue
        a, b = (_made(o) if wanted else o for o, wanted in zip((p.a, p.b), made, strict=True))
        inside = replace(p, a=a, b=b)
        left = tuple(can and not wanted for can, wanted in zip(able, made, strict=True))
        way = _loop_time(inside, made, machine).later(_apart_time(p, left, machine))
        if way.time < best[2].time + (_apart_time(p, able, machine) if best[0] is p else 0.0):
            best = inside, made, way
    apart = _apart_time(p, able, machine)
    product, made, way = best
    return product, made, way.later(apart) if product is p else way, apart


def _made(o: Operand) -> Operand:
    """An operand that a product makes, though it reads no less."""
    assert o.prologue is not None
    m = o.prologue
    return replace(o, made=m.made, read=m.read, flops=m.flops, is_wide=m.is_wide)


def _apart_time(p: LibraryProduct, made: tuple[bool, ...], machine: Machine) -> float:
    """What the kernels that make operands move, and their launches."""
    prologues = [o.prologue for o, wanted in zip((p.a, p.b), made, strict=True) if wanted]
    return sum(m.saved / machine.bandwidth + m.launches * machine.launch for m in prologues if m is not None)


def _with_vector(p: LibraryProduct, machine: Machine) -> Decision:
    """A product with a vector reads its matrix once, at the rate of memory, whoever does it: rows of a matrix in loops
    of ours, where kernels before, behind or beside it then cost no launch.

    Where the matrix does not run along what is summed, or has few rows, the library does better.
    """
    name = machine.libraries.products
    matrix, k = (p.a, -1) if p.n == 1 else (p.b, -2)
    refused = ""
    if p.alone:
        refused = "no kernel before, behind or beside it"
    elif not _is_along(matrix, k) or not matrix.is_wide:
        refused = "the matrix has no rows of 16-byte words along what is summed"
    elif p.batch * max(p.m, p.n) < VECTOR_ROWS * machine.cores:
        refused = "few rows"
    elif len(p.axes) > 1 and 1 not in p.shape[-2:]:
        refused = "how many rows there are is not known"
    if refused:
        return Decision(False, f"matrix product with a vector: {name}; {refused}")
    return Decision(True, f"matrix product with a vector, {matrix.bytes >> 10} KiB read once: with what is around it")


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to do a product in loops, and its nanoseconds; ``whole`` are those of a program for each tile."""

    time: float
    whole: float
    pieces: int = 1
    stream_k: StreamK | None = None

    def later(self, time: float) -> _Way:
        return replace(self, time=self.time + time, whole=self.whole + time)


def _is_bytes(p: LibraryProduct) -> bool:
    """Whether it is a product of bytes, which adds up to integers."""
    return p.type.dtype is DType.INT32 and p.a.type.dtype is DType.INT8


def _is_along(o: Operand, k: int) -> bool:
    """Whether an operand's memory runs along its dimension ``k``."""
    return o.type.strides[k] == 1


def _gain(p: LibraryProduct, packed: tuple[bool, bool], way: _Way) -> str:
    made = [
        f"{o.name} made of {o.read >> 10} KiB, {o.bytes >> 10} as it is"
        for o, inlined in zip((p.a, p.b), packed, strict=True)
        if inlined
    ]
    saved = _saved_bytes(p)
    after = [f"{saved >> 10} KiB of the result {'not read back' if p.leaves else 'kept in registers'}"] if saved else []
    if (shared := _shared_bytes(p)) > 0:
        after.append(f"{shared >> 10} KiB less for the reduction behind it")
    cut = [f"the sum in {way.pieces} pieces"] if way.pieces > 1 else []
    if way.stream_k is not None:
        k = way.stream_k
        tiles = p.batch * -(-p.m // k.rows) * -(-p.n // k.columns)
        cut = [f"the steps of {tiles} tiles dealt to {k.programs} programs (whole tiles take {_time(way.whole)})"]
    return ", ".join(made + after + cut) or "nothing saved"


def _time(ns: float) -> str:
    return f"{ns / 1e3:.1f} us"


def _result_bytes(p: LibraryProduct) -> int:
    return p.batch * p.m * p.n * p.type.dtype.itemsize


def _followed(p: LibraryProduct) -> bool:
    """Whether all that reads the result can run on its tiles."""
    return bool(p.readers) and all(isinstance(r, Compute) or r.names[0] in p.tiled for r in p.readers)


def _ends(p: LibraryProduct) -> bool:
    """Whether a reduction of what is made of the result wants more of it than a tile."""
    return any(isinstance(n, Reduction) and n.names[0] not in p.tiled for n in p.then)


def _saved_bytes(p: LibraryProduct) -> int:
    """Bytes of the result that are not written, and not read back, where its readers run on its tiles.

    A reader that feeds a reduction ends its tile in memory all the same, where the reduction's kernel would have made
    it, unless tiles give their parts of what it makes.
    """
    if not _followed(p) or _ends(p):
        return 0
    return _result_bytes(p) * (1 + (not p.leaves))


def _shared_bytes(p: LibraryProduct) -> int:
    """Bytes that the kernel of a reduction behind the product would move, where it has to wait for them, and that the
    product's own kernel moves while it multiplies: the result, what is added to it and the like, and what that makes
    for others too; less what the reduction then reads instead, which may be more."""
    return _result_bytes(p) + p.beside + p.kept - p.made if _is_awaited(p) else 0


def _is_awaited(p: LibraryProduct) -> bool:
    """Whether what is made of the result, and not the result, is what a reduction behind the product reads."""
    return _followed(p) and _ends(p) and not p.leaves


def _saved_launches(p: LibraryProduct) -> int:
    return int(_followed(p) and not _ends(p) and not p.tiled)


def _making_time(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> float:
    """Operands made and written by kernels of their own, unless something else needs them in memory anyway."""
    total = 0.0
    for o, inlined, shared in zip((p.a, p.b), packed, p.shared, strict=True):
        if inlined and not shared:
            total += (o.read + o.bytes) / machine.bandwidth + machine.launch
    return total


def _size(p: LibraryProduct) -> Extent:
    return Extent(p.batch, p.m, p.n, p.k)


def _rate(p: LibraryProduct, machine: Machine, kinds: Collection[DType]) -> float:
    """Operations a nanosecond; ``kinds`` are the types that tensor cores multiply."""
    if _type(p) not in kinds:
        return machine.float32
    return machine.matmul * 2 if _is_bytes(p) else machine.matmul


def _type(p: LibraryProduct) -> DType:
    """The type that is multiplied."""
    return DType.INT8 if _is_bytes(p) else p.type.dtype


def _shapes(p: LibraryProduct, kinds: Collection[DType]) -> tuple[TileShape, ...]:
    if min(p.m, p.n) == 1:
        return VECTOR_SHAPES
    return SHAPES if _type(p) in kinds else PLAIN_SHAPES


def _library_time(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> float:
    """Operands made, the product, and its result read back by what follows."""
    moved = p.a.bytes + p.b.bytes + _result_bytes(p)
    after = (
        _saved_launches(p) * machine.launch
        + max(_saved_bytes(p) - _result_bytes(p) * (not p.leaves), 0) / machine.bandwidth
    )
    after += max(_shared_bytes(p), 0) / machine.bandwidth
    read, multiplied = _library_shares(p, packed, machine)
    rate = _rate(p, machine, machine.multiplied) * multiplied
    rates = Rates(machine.cores, machine.bandwidth * read, rate, reach(machine))
    # It cuts the summed axis too, and where it does, adds the pieces up in the same launch.
    best = min(multiplying_time(_size(p), k, moved, rates, _shapes(p, machine.multiplied)) for k in _pieces(p))
    return _making_time(p, packed, machine) + best + after


def _library_shares(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> tuple[float, float]:
    """What is left of a library's rates of reading and of multiplying where rows begin anywhere. An operand that is
    made for it can be written in rows that do not."""
    if _type(p) not in machine.multiplied:
        return 1.0, 1.0
    return rates_left(all(made or o.is_aligned for o, made in zip((p.a, p.b), packed, strict=True)), p.is_aligned)


def product_time(p: LibraryProduct, machine: Machine) -> float:
    """Nanoseconds of a product of half types, done by whoever is faster."""
    packed = p.a.is_packed, p.b.is_packed
    return min(_library_time(p, packed, machine), _loop_time(p, packed, machine).time)


def library_time(p: LibraryProduct, machine: Machine) -> float:
    """Nanoseconds of a product of half types in the library."""
    return _library_time(p, (p.a.is_packed, p.b.is_packed), machine)


def with_even_rows(p: LibraryProduct) -> LibraryProduct:
    """A product whose matrices have rows that begin at multiples of 16 bytes."""
    a, b = (replace(o, is_aligned=True, is_wide=o.is_wide or not o.is_packed) for o in (p.a, p.b))
    return replace(p, a=a, b=b, is_aligned=True)


def with_even_operands(p: LibraryProduct) -> LibraryProduct:
    """A product that reads copies whose rows begin at multiples of 16 bytes; loops of ours read through copies."""
    return replace(p, a=replace(p.a, is_aligned=True), b=replace(p.b, is_aligned=True))


def _loop_time(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> _Way:
    """One visit of what is read, an element made for every tile that it is part of: by a program for each tile, by
    several for pieces of the summed axis, or by as many as the target has multiprocessors, for runs of steps."""
    read = sum(o.read if inlined else o.bytes for o, inlined in zip((p.a, p.b), packed, strict=True))
    kept = _result_bytes(p) if _followed(p) and not p.leaves else 0
    along = p.beside + p.made + max(-_shared_bytes(p), 0) if _is_awaited(p) else 0
    made = MAKING * machine.issued
    making = sum(
        _elements(o) * (1 + o.flops) * -(-others // TILE) / made
        for o, others, inlined in zip((p.a, p.b), (p.n, p.m), packed, strict=True)
        if inlined and not o.is_copied
    )
    kinds = machine.in_kernels
    rate = _rate(p, machine, kinds) * (OURS if _type(p) in kinds else OURS_PLAIN)
    share = 1.0 if p.a.is_wide and p.b.is_wide else NARROW
    rates = Rates(machine.cores, machine.bandwidth * OURS_READING * share, rate * share, reach(machine))

    moved = read + _result_bytes(p) - kept + along
    # Elements of rows that begin anywhere are written one by one, behind the last step.
    narrow = 0.0 if p.is_aligned else (_result_bytes(p) - kept) * (1 / NARROW - 1) / machine.bandwidth

    # What is memory as it is but for factors of the result is copied ahead as any operand is.
    opened = [o for o, inlined in zip((p.a, p.b), packed, strict=True) if inlined and o.prologue is not None]
    waits = any(o.flops for o in opened)
    wait = STEP_WAIT / STEP if waits else 0.0
    lookup = LOOKUP_WAIT if any(o.prologue is not None and o.prologue.gathers for o in opened) else 0.0

    def cut(pieces: int) -> float:
        sums = pieces * p.batch * p.m * p.n * p.accumulator.itemsize
        added = 2 * sums / machine.bandwidth + machine.launch if pieces > 1 else 0.0
        found = multiplying_time(_size(p), pieces, moved, rates, _shapes(p, kinds), making, wait)
        return found + added + narrow + lookup

    def dealt(shape: TileShape) -> float:
        tiles = p.batch * -(-p.m // shape.rows) * -(-p.n // shape.columns)
        # A sum for each tile that a program may touch is written; one for each that it does touch is read.
        sums = machine.cores * (-(-tiles // machine.cores) + 1) + tiles + machine.cores
        added = sums * shape.rows * shape.columns * p.accumulator.itemsize / machine.bandwidth + machine.launch
        return dealt_time(_size(p), moved, rates, shape, making) + added + narrow + lookup

    whole = cut(1)
    ways = [_Way(cut(k), whole, k) for k in _pieces(p)[1:]]
    for s in _dealt_shapes(p, machine) if not waits and not _has_digits(p, packed) else ():
        ways.append(_Way(dealt(s), whole, stream_k=StreamK(s.rows, s.columns, s.step, machine.cores)))
    best = min(ways, key=lambda w: w.time, default=_Way(whole, whole))
    return best if best.time < whole * (1 - CUT_WORTH) else _Way(whole, whole)


def _has_digits(p: LibraryProduct, packed: tuple[bool, bool]) -> bool:
    """Whether an operand tells positions along the summed axis apart (groups, parts of a word): it becomes several."""
    values = [o.value for o, inlined in zip((p.a, p.b), packed, strict=True) if inlined]
    divided = any(R0 in i.free_symbols and i.has(*DIVISIONS) for v in values for i in index_exprs(v))
    return divided or any(isinstance(e, IndexValue) and R0 in e.index.free_symbols for v in values for e in walk(v))


def _dealt_shapes(p: LibraryProduct, machine: Machine) -> list[TileShape]:
    """The tiles whose steps may be dealt evenly: those for many results, of which there are enough to go round and not
    so many that the last of them are few."""
    if min(p.m, p.n) < GROUP_ROWS or len(p.axes) < 2:
        return []
    found: list[TileShape] = []
    for s in _shapes(p, machine.in_kernels):
        tiles = p.batch * -(-p.m // s.rows) * -(-p.n // s.columns)
        steps = tiles * -(-p.k // s.step)
        if s.rows >= GROUP_ROWS and s.rows <= p.m and s.columns <= p.n and steps >= LEAST_RUN * machine.cores:
            found.append(s)
    return found


def _pieces(p: LibraryProduct) -> list[int]:
    """In how many pieces of one length, each a multiple of the steps of the tensor cores, the summed axis may be."""
    if min(p.m, p.n) == 1 or not p.depth.is_Integer:
        return [1]
    deepest = min(p.k // PIECE_DEPTH, MOST_PIECES)
    return [1, *(k for k in range(2, deepest + 1) if p.k % (k * STEP) == 0)]


def _elements(o: Operand) -> float:
    return o.bytes / o.type.dtype.itemsize
