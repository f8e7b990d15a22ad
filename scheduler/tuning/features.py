"""Features: what a model of speed knows of a draft, before it is replayed, and of a scheduled nest.

Logarithms (base 2), sums, maxima and shares, in the order of ``DRAFT_FEATURES`` and ``NEST_FEATURES``. A change of
what a number means is a new ``FEATURES_VERSION``: models are refused that were trained with another. Sizes that are
symbols count as their typical values, so the same structure with other sizes has comparable features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import is_value
from ...ir.nest.hints import HINTS
from ...ir.nest.loops import LoopNest, Update
from ...ir.target import Target
from ..cost.cpu_kernels import LINE
from ..schedule.schedule import Schedule
from .edits import KINDS
from .loop_features import LOOP_FEATURES, NUMBERS, base_features, loop_features
from .measures import CLASSES, NestMeasures, measured
from .space import Draft, Space

FEATURES_VERSION = 3

Array: TypeAlias = "np.ndarray[Any, Any]"
MONOIDS = ("sum", "max", "min", "welford", "moments", "logsumexp", "attention", "weighted", "argmax", "argmin")
# Parameters of rules; one that is not listed (of a user's rule) is only counted.
PARAMETERS = (
    "at_once", "block", "blocks", "column_parts", "columns", "copies", "descriptors", "group", "keys", "lanes",
    "one_load", "partials", "partition", "parts", "persistent", "piece", "pieces", "queries", "registers", "resident",
    "rows", "specialized", "stages", "tile", "together", "turns", "unroll", "warps", "whole", "wide",
)  # fmt: skip
# Rules by number; a rule that is not listed (a user's) is -1.
RULES = (
    "cpu_row_blocks", "cpu_scatter", "cpu_attention_rows", "cpu_attention", "cpu_scan", "cpu_pointwise", "cpu_stencil",
    "cpu_contraction", "cpu_cross_reduction", "cpu_column_reduction", "cpu_split_reduction", "cpu_row_reduction",
    "cpu_plain", "gpu_scatter", "gpu_segments", "gpu_attention", "gpu_attention_gradients", "gpu_attention_bias",
    "gpu_scan", "gpu_contraction", "gpu_matrix_vector", "gpu_stencil", "gpu_filters", "gpu_transpose", "gpu_pointwise",
    "gpu_cross_reduction", "gpu_column_reduction", "gpu_row_persistent", "gpu_row_online", "gpu_row_looped",
    "gpu_plain",
)  # fmt: skip
# Rules that came later, and are told by the place of one that does the same work.
ALIKE = {
    "cpu_product_tiles": "cpu_contraction", "cpu_dot_products": "cpu_contraction", "gpu_small": "gpu_scatter",
}  # fmt: skip
# Hints of buffers are counted, those of names by the sign of what they say.
_HINTS = (*NUMBERS, *(h.name for h in HINTS.values() if h.of_buffer))
# What of the rule's own schedule, before edits, a draft's features hold.
_OF_BASE = (
    "loops.parallel.extent", "loops.parallel.imbalance", "loops.lanes.most", "loops.lanes.least",
    "loops.copies.most", "loops.serial.innermost", "loops.accumulators", "loops.waste", "loops.instructions",
    "loops.entered", "footprint.0.l1", "footprint.1.l1", "footprint.2.l2", "loops.grid", "loops.tile",
)  # fmt: skip

WORKLOAD = (
    "work.iterations", "work.flops", "work.rows", "work.inner", "work.innermost", "work.innermost.divisor",
    *(f"work.ops.{c}" for c in CLASSES), "work.ops.heaviest",
    "work.bytes.read", "work.bytes.written", "work.bytes.local", "work.bytes.accessed", "work.intensity",
    "work.params", "work.outputs", "work.locals", "work.blocks", "work.reductions", "work.scans", "work.scatters",
    *(f"work.monoid.{m}" for m in MONOIDS), "work.monoid.other",
    "work.dtype.half", "work.dtype.float", "work.dtype.double", "work.dtype.narrow", "work.dtype.int",
    "work.gathers", "work.stride.one", "work.stride.zero", "work.stride.other", "work.align", "work.symbolic",
)  # fmt: skip
TARGET = (
    "target.cores", "target.vector", "target.l1", "target.l2", "target.warp", "target.shared",
    "target.bandwidth", "target.float32", "target.registers", "target.reads_ahead",
)  # fmt: skip
DECISIONS = (
    "draft.rule", "draft.rule.place", "draft.params.changed", "draft.params.unlisted",
    *(f"draft.param.{p}" for p in PARAMETERS), "draft.edits", *(f"draft.edit.{k}" for k in KINDS),
    "draft.factor.up", "draft.factor.down", "draft.lanes.up", "draft.lanes.down", "draft.reduces",
    "draft.chunk", "draft.tile", "draft.jam", "draft.unroll", "draft.lanes.set",
    *(f"draft.hint.{h}" for h in _HINTS), "draft.hint.other",
)  # fmt: skip
# What counts within a nest is how a schedule differs from the default one: ``beside`` are these differences.
DRAFT_FEATURES: tuple[str, ...] = (
    *WORKLOAD, *TARGET, *(f"base.{n}" for n in _OF_BASE), *(f"beside.{n}" for n in _OF_BASE), *DECISIONS,
)  # fmt: skip
NEST_FEATURES: tuple[str, ...] = (*WORKLOAD, *TARGET, *LOOP_FEATURES, *(f"beside.{n}" for n in LOOP_FEATURES))
_PLACE = {name: k for k, name in enumerate(DECISIONS)}
_PARAM = {p: _PLACE[f"draft.param.{p}"] for p in PARAMETERS}
_KIND = {k: _PLACE[f"draft.edit.{k}"] for k in KINDS}
_HINT = {h: _PLACE[f"draft.hint.{h}"] for h in _HINTS}
_SUMMED = {k: _PLACE[f"draft.{k}"] for k in ("chunk", "tile", "jam", "unroll")}
_RULE = {r: RULES.index(ALIKE.get(r, r)) for r in (*RULES, *ALIKE)}
# What an edit that writes out all iterations counts as.
_ALL_WRITTEN = 4.0


def draft_features(space: Space, drafts: Sequence[Draft]) -> Array:
    """Features of drafts without replaying them: float32 of shape ``[len(drafts), len(DRAFT_FEATURES)]``."""
    fixed = _of_space(space)
    result = np.empty((len(drafts), len(DRAFT_FEATURES)), np.float32)
    result[:, : len(fixed)] = fixed
    first, middle = len(fixed) + len(_OF_BASE), len(fixed) + 2 * len(_OF_BASE)
    default = _base(space, space.default())
    rows = []
    for k, draft in enumerate(drafts):
        base = _base(space, draft)
        result[k, len(fixed) : first], result[k, first:middle] = base, base - default
        rows.append(_decisions(space, draft))
    if rows:
        result[:, middle:] = rows
    return result


def nest_features(space: Space, schedule: Schedule) -> Array:
    """Features of a scheduled nest of a space: float32 of shape ``[len(NEST_FEATURES)]``."""
    default: tuple[LoopNest, Array] | None = space.memo.get("default")
    if default is None:
        made = space.replayed(space.default())
        assert made is not None, "the default applies always"
        default = space.memo["default"] = made.nest, _loops(space, made.nest)
    loops = default[1] if schedule.nest is default[0] else _loops(space, schedule.nest)
    return np.concatenate([_of_space(space), loops, loops - default[1]])


def _loops(space: Space, nest: LoopNest) -> Array:
    return _row(LOOP_FEATURES, loop_features(measured(nest), space.target))


def about_workload(space: Space) -> Mapping[str, float]:
    """``workload_features`` of a space's nest, which are computed once."""
    found: Mapping[str, float] | None = space.memo.get("workload")
    if found is None:
        found = space.memo["workload"] = workload_features(measured(space.nest))
    return found


def _of_space(space: Space) -> Array:
    """What all drafts, and all schedules, of a space have in common."""
    fixed: Array | None = space.memo.get("features")
    if fixed is None:
        about = {**about_workload(space), **target_features(space.target)}
        fixed = space.memo["features"] = _row((*WORKLOAD, *TARGET), about)
    return fixed


def _row(names: Sequence[str], values: Mapping[str, float]) -> Array:
    row = np.fromiter((values[n] for n in names), np.float64, len(names))
    assert np.isfinite(row).all(), [n for n in names if not math.isfinite(values[n])]
    return row.astype(np.float32)


def log(value: float) -> float:
    """The logarithm of one more, so that nothing is zero."""
    return math.log2(1.0 + max(value, 0.0))


# --- what is computed, and where --------------------------------------------------------------------------------------


def workload_features(found: NestMeasures) -> dict[str, float]:
    """What a nest computes, whatever its loops are."""
    nest, works = found.nest, found.works
    hint = nest.symbols.hint
    operations = dict.fromkeys(CLASSES, 0.0)
    for w in works:
        for name, count in w.operations.items():
            operations[name] += count * w.useful
    flops = sum(operations.values())
    widest = max(works, key=lambda w: (w.useful, len(w.block.axes)), default=None)
    axes = widest.block.axes if widest is not None else ()
    inner = [hint(a.extent) for a in axes if a.dim.value == "inner"]
    rows = [hint(a.extent) for a in axes if a.dim.value != "inner"]
    last = axes[-1].extent if axes else sympy.S.One
    size = {b.name: float(math.prod(hint(e) for e in b.shape)) * b.dtype.itemsize for b in (*nest.params, *nest.locals)}
    touched = {r.buffer: 0.0 for w in works for r in w.references}
    for w in works:
        for r in w.references:
            bytes_ = min(size[r.buffer], LINE * found.lines(w, r))
            touched[r.buffer] = max(touched[r.buffer], bytes_)
    written = {a.buffer for w in works for a in w.block.writes}
    local = {b.name for b in nest.locals}
    accessed = sum(w.useful * r.itemsize for w in works for r in w.references)
    moved = sum(v for k, v in touched.items() if k not in local)
    updates = [s for w in works for s in w.block.body if isinstance(s, Update)]
    monoids = {m: float(sum(s.monoid.name == m for s in updates)) for m in MONOIDS}
    values: dict[str, float] = {
        "work.iterations": log(sum(w.useful for w in works)), "work.flops": log(flops),
        "work.rows": log(math.prod(rows)), "work.inner": log(math.prod(inner)), "work.innermost": log(hint(last)),
        "work.innermost.divisor": log(math.gcd(nest.symbols.divisor(last), 64)),
        **{f"work.ops.{c}": log(n) for c, n in operations.items()},
        "work.ops.heaviest": log(max((w.cost for w in works), default=0.0)),
        "work.bytes.read": log(sum(v for k, v in touched.items() if k not in local and k not in written)),
        "work.bytes.written": log(sum(v for k, v in touched.items() if k not in local and k in written)),
        "work.bytes.local": log(sum(v for k, v in touched.items() if k in local)),
        "work.bytes.accessed": log(accessed), "work.intensity": log(flops / max(moved, 1.0)),
        "work.params": float(len(nest.params)), "work.outputs": float(len(nest.outputs)),
        "work.locals": float(len(nest.locals)), "work.blocks": float(len(works)),
        "work.reductions": float(sum(w.block.is_reduction for w in works)),
        "work.scans": float(sum(w.block.is_scan for w in works)),
        "work.scatters": float(sum(w.block.is_scatter for w in works)),
        **{f"work.monoid.{m}": n for m, n in monoids.items()},
        "work.monoid.other": float(len(updates)) - sum(monoids.values()),
        **_dtypes(found, touched), **_accesses(found),
        "work.align": log(min((b.align for b in nest.params), default=0)),
        "work.symbolic": _share(not e.is_Integer for w in works for e in (a.extent for a in w.block.axes)),
    }  # fmt: skip
    return values


def _dtypes(found: NestMeasures, touched: Mapping[str, float]) -> dict[str, float]:
    """Shares of the bytes."""
    kinds = {b.name: b.dtype for b in (*found.nest.params, *found.nest.locals)}
    total = max(sum(touched.values()), 1.0)

    def share(*dtypes: DType) -> float:
        return sum(v for k, v in touched.items() if kinds[k] in dtypes) / total

    return {
        "work.dtype.half": share(DType.FLOAT16, DType.BFLOAT16), "work.dtype.float": share(DType.FLOAT32),
        "work.dtype.double": share(DType.FLOAT64),
        "work.dtype.narrow": sum(v for k, v in touched.items() if kinds[k].itemsize == 1) / total,
        "work.dtype.int": sum(v for k, v in touched.items() if kinds[k].is_int) / total,
    }  # fmt: skip


def _accesses(found: NestMeasures) -> dict[str, float]:
    """Shares of all accesses by how they move along the dimension in which most are contiguous."""
    total = one = zero = gathers = 0.0
    for w in found.works:
        best: dict[str, float] = {}
        buffers = found.nest.buffers
        sites = [*((ld.buffer, ld.indices) for ld in w.block.reads), *((a.buffer, a.indices) for a in w.block.writes)]
        moves: list[dict[sympy.Symbol, int]] = []
        for name, indices in sites:
            along: dict[sympy.Symbol, int] = {}
            for index, stride in zip(indices, buffers[name].strides, strict=True):
                if not is_value(index):
                    for s in index.free_symbols:  # type: ignore[attr-defined]
                        along[s] = along.get(s, 0) + found.nest.symbols.hint(stride)
            moves.append(along)
            for s, by in along.items():
                best[s.name] = best.get(s.name, 0.0) + (by == 1)
        axis = max(best, key=lambda n: (best[n], n), default="")
        for (_, indices), along in zip(sites, moves, strict=True):
            by = next((v for s, v in along.items() if s.name == axis), 0)
            total += w.useful
            gathers += w.useful * any(is_value(i) for i in indices)
            one += w.useful * (by == 1)
            zero += w.useful * (by == 0)
    total = max(total, 1.0)
    return {
        "work.gathers": gathers / total, "work.stride.one": one / total, "work.stride.zero": zero / total,
        "work.stride.other": max(total - one - zero, 0.0) / total,
    }  # fmt: skip


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / max(len(found), 1)


def target_features(target: Target) -> dict[str, float]:
    """What the machine is."""
    machine = target.machine
    return {
        "target.cores": log(target.cores), "target.vector": log(target.vector_bytes),
        "target.l1": log(target.l1_bytes), "target.l2": log(target.l2_bytes), "target.warp": float(target.warp),
        "target.shared": log(target.shared_bytes), "target.bandwidth": log(machine.bandwidth),
        "target.float32": log(machine.float32), "target.registers": log(target.registers),
        "target.reads_ahead": float(machine.reads_ahead),
    }  # fmt: skip


# --- what a draft decides ---------------------------------------------------------------------------------------------


def _base(space: Space, draft: Draft) -> Array:
    """Of the rule's own schedule, by the draft's parameters."""
    known: dict[Any, Array] = space.memo.setdefault("bases", {})
    key = space.plain(draft)
    row = known.get(key)
    if row is None:
        schedule = space.base(key)
        if schedule is None:
            row = np.full(len(_OF_BASE), -1.0, np.float32)
        else:
            row = _row(_OF_BASE, base_features(measured(schedule.nest), space.target))
        known[key] = row
    return row


def _decisions(space: Space, draft: Draft) -> list[float]:
    row = [0.0] * len(DECISIONS)
    for place in _PARAM.values():
        row[place] = -1.0
    for place in _HINT.values():
        row[place] = -1.0
    values = space.values[draft.rule]
    row[0], row[1] = float(_RULE.get(draft.rule, -1)), float(space.rules.index(draft.rule))
    changed = 0
    for name, value in draft.params:
        changed += value != values[name][0]
        if name in _PARAM and not isinstance(value, str):
            row[_PARAM[name]] = log(float(value))
        else:
            row[3] += 1.0
    row[2] = float(changed)
    row[_PLACE["draft.edits"]] = float(len(draft.edits))
    if draft.edits:
        _edits(space, draft, row)
    return row


def _edits(space: Space, draft: Draft, row: list[float]) -> None:
    sites = space.site_table(draft)
    for e in draft.edits:
        row[_KIND[e.kind]] += 1.0
        site = sites.get((e.kind, e.at))
        if site is not None and site.reduces:
            row[_PLACE["draft.reduces"]] += 1.0
        if e.kind == "factor" and site is not None and isinstance(site.here, int) and not isinstance(e.value, str):
            ratio = math.log2(e.value / site.here)
            row[_PLACE[f"draft.{'lanes' if site.is_lanes else 'factor'}.{'up' if ratio > 0 else 'down'}"]] += abs(ratio)
        elif e.kind == "lanes":
            place = _PLACE["draft.lanes.set"]
            row[place] = max(row[place], log(float(e.value)))
        elif e.kind in _SUMMED:
            row[_SUMMED[e.kind]] += math.log2(float(e.value)) if e.value else _ALL_WRITTEN
        elif e.kind == "hint":
            _hint(e.at, e.value, row)


def _hint(at: str, value: int | str, row: list[float]) -> None:
    """-1 where no edit speaks of a hint; else the greatest value, or how many buffers have one."""
    name = at.split(":")[1]
    place = _HINT.get(name)
    if place is None:
        row[_PLACE["draft.hint.other"]] += 1.0
    elif HINTS[name].of_buffer:
        row[place] = max(row[place], 0.0) + (HINTS[name].choices.index(value) + 1.0 if HINTS[name].choices else 1.0)
    else:
        row[place] = max(row[place], log(float(value)))
