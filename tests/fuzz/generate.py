"""The program of a seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from .lines.algebra import ALGEBRA
from .lines.arguments import grown, negated, overlapping, tied
from .lines.blocks import BLOCKS
from .lines.control import CONTROL
from .lines.draws import DRAWS
from .lines.elementwise import ELEMENTWISE
from .lines.functions import FUNCTIONS
from .lines.indexing import INDEXING
from .lines.maker import FLOATS, INTEGERS, Info, Maker, NoFit
from .lines.modules import MODULES
from .lines.plain import PLAIN
from .lines.reductions import REDUCTIONS
from .lines.training import TRAINING
from .lines.transforms import TRANSFORMS
from .lines.unsigned import UNSIGNED_INTEGERS
from .lines.views import VIEWS
from .lines.writes import WRITES
from .program import DRAW, Program, Sizes, mentioned
from .run import function_of, inputs_of, run_rounds, run_wide

FAMILIES = (
    (4.0, ELEMENTWISE), (4.0, VIEWS), (2.5, REDUCTIONS), (2.5, INDEXING), (1.5, MODULES), (1.5, WRITES),
    (1.2, FUNCTIONS), (1.2, CONTROL), (1.5, BLOCKS), (0.9, ALGEBRA),
    (1.2, DRAWS), (2.0, TRANSFORMS), (1.0, TRAINING), (0.6, UNSIGNED_INTEGERS), (1.5, PLAIN),
)  # fmt: skip
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 3, 5, 13, 16, 17, 31, 32, 33, 64, 65)
# One size of some programs is large: rows that do not stay in registers or caches, work that a team of threads shares.
LARGE = (127, 128, 129, 255, 256, 257, 384, 500, 512, 1000, 1024, 1025, 2047, 4096, 4100, 8192, 8193)
LARGE_SHARE = 0.15


def make_program(seed: int) -> Program:
    """The program of a seed; the same one always."""
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            program = _try(seed, rng)
            if program is not None:
                return program


def _try(seed: int, rng: random.Random) -> Program | None:
    dynamic = rng.choice((False, False, False, False, True, None))
    large = rng.random() < LARGE_SHARE
    maker = Maker(
        seed, rng, _sizes(rng, dynamic, large), dynamic, gradient=rng.random() < 0.45, special=rng.random() < 0.06,
        elements=150_000 if large else 6000,
    )  # fmt: skip
    try:
        for _ in range(rng.choice((1, 2, 2, 3))):
            _first_input(maker)
    except NoFit:
        return None
    lines = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12))
    for _ in range(lines * 8):
        if len(maker.steps) >= lines:
            break
        (family,) = rng.choices([f for _, f in FAMILIES], [w for w, _ in FAMILIES])
        (op,) = rng.choices([f for _, f in family], [w for w, _ in family])
        try:
            draft = op(maker)
        except NoFit:
            continue
        maker.add(draft)
    program = maker.program(
        _returns(maker), capture=rng.random() < 0.5, rounds=_rounds(maker), options=_options(rng)
    )  # fmt: skip
    if not any(s.results for s in maker.steps):
        return None
    read = {o for s in maker.steps for o in s.operands} | set(program.returns)
    read |= {n for i in maker.inputs for n in mentioned(i.text, [x.name for x in maker.inputs])}
    program = replace(program, inputs=tuple(i for i in program.inputs if i.name in read))
    return _runs(program) or _runs(replace(program, rounds=1)) or _runs(replace(program, rounds=1, gradient=False))


def _rounds(m: Maker) -> int:
    """More than one where no call sees what another has written."""
    if any(s.kind == "write" and m.shares_input(s.operands[0]) for s in m.steps):
        return 1
    return m.rng.choice((1, 1, 2, 3))


def _options(rng: random.Random) -> dict[str, object]:
    """Settings: eager's rounding, native host programs, kernels verified as they are built, threads, losses in pieces,
    schedules that measurements choose; caches at times.
    """
    found: dict[str, object] = {}
    for name, value, share in (
        ("numerics", "eager", 0.15), ("host_program", "native", 0.2), ("verify", 1, 0.07), ("loss_chunk", 3, 0.1),
        ("threads", rng.choice((2, 3)), 0.25), ("tune", True, 0.03),
    ):  # fmt: skip
        if rng.random() < share:
            found[name] = value
    if "tune" in found:
        found["tune_budget"] = "300ms"
    if rng.random() < 0.75:
        found["cache"] = False
    return found


def _runs(program: Program) -> Program | None:
    """The program, if eager runs all of it, also in double precision."""
    try:
        for sizes in program.sizes:
            run_rounds(program, function_of(program), inputs_of(program, sizes), program.rounds)
            run_wide(program, sizes, None, program.rounds)
    except Exception:
        return None
    return program


def _sizes(rng: random.Random, dynamic: bool | None, large: bool) -> tuple[Sizes, ...]:
    names = "ABC"
    if large:
        found = [dict(zip(names, (rng.choice(LARGE), *rng.sample(SIZES[:12], 2)), strict=True))]
        if dynamic is not False:
            found.append({n: rng.choice((*LARGE, *SIZES)) if n == "A" else rng.choice(SIZES[:12]) for n in names})
        return tuple(found)
    if dynamic is False:
        pool = (*SIZES, 1, 1, 0, 0) if rng.random() < 0.4 else SIZES
        return ({n: rng.choice(pool) for n in names},)
    first = dict(zip(names, rng.sample(SIZES[:13], 3), strict=True))
    later = [{n: rng.choice((*SIZES[:13], 1, 0, 2) if rng.random() < 0.3 else SIZES[:13]) for n in names}]
    if rng.random() < 0.4:
        later.append({n: rng.choice(SIZES) for n in names})
    return (first, *later)


def _first_input(m: Maker) -> None:
    rng = m.rng
    kind = rng.random()
    dtype: torch.dtype = torch.float32
    if kind > 0.6:
        dtype = rng.choice(FLOATS)
    if kind > 0.82:
        dtype = rng.choice((*INTEGERS, torch.bool))
    values = "special" if m.special else "normal" if rng.random() < 0.25 else "eighths"
    if not dtype.is_floating_point:
        values = "range" if rng.random() < 0.2 else "eighths"
    names = [rng.choice(("A", "B", "C", "1", "A", "B", "C", "4")) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3, 4)))]
    shapes = [[s[n] if n in s else int(n) for n in names] for s in m.sizes]
    if (make := _odd_input(m)) is not None:
        make(m)
        return
    m.fresh(shapes, dtype, values)


def _odd_input(m: Maker) -> Callable[[Maker], Info] | None:
    form = m.rng.random()
    if form < 0.05 and not m.special:
        return overlapping
    if form < 0.07:
        return negated
    if m.inputs and form < 0.13:
        return tied
    return grown if form < 0.3 and any(i.grad for i in m.inputs) else None


def _returns(m: Maker) -> tuple[str, ...]:
    """What nobody has read, some of what somebody has, at times an input or a size."""
    rng = m.rng
    made = [r for s in m.steps for r in s.results]
    # What nobody needs draws no random numbers when it is compiled, and others draw them instead.
    drawn = [r for s in m.steps if DRAW.search(s.text) for r in (s.results or s.operands[:1])]
    unread = [n for n in made if n not in m.used and n not in drawn]
    found = (
        list(dict.fromkeys(drawn))
        + unread[-6:]
        + [n for n in made if n in m.used and n not in drawn and rng.random() < 0.12]
    )
    if rng.random() < 0.05:
        found.append(rng.choice(m.inputs).name)
    if rng.random() < 0.05 and (shaped := [n for n in m.names if m.info(n).ndim]):
        found.append(f"{rng.choice(shaped)}.shape[0]")
    if rng.random() < 0.03 and found:
        found.append(found[0])
    return tuple(found or made[-1:] or (m.inputs[0].name,))
