"""Seeds: what similar nests have chosen, as drafts to begin a search with.

Nests of the same structure with other sizes come first, then those that are near by their features; what was measured
on other targets comes last. A draft names places and not sizes, so most of it serves; what does not is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from .database import Records, Similar, Workload, target_key
from .edits import TraceEdit, arranged
from .features import workload_features
from .measures import measured
from .space import Draft, Space

# Seeds of a search, and how many similar schedules are looked at for them.
MOST_SEEDS, LOOKED_AT = 6, 48


def workload_of(nest: LoopNest, about: Mapping[str, float] | None = None) -> Workload:
    """A nest (by names of position) as databases know it, with its features: ``about`` where they are known."""
    about = workload_features(measured(nest)) if about is None else about
    return Workload.of(nest, tuple(float(f"{v:.6g}") for v in about.values()))


def seeds_of(space: Space, workload: Workload, database: Records) -> list[Draft]:
    """Drafts that were faster than the default for similar nests, those first that are most likely to serve here."""
    return seeds(space, workload, database.similar(workload))


def seeds(space: Space, workload: Workload, similar: Sequence[Similar], most: int = MOST_SEEDS) -> list[Draft]:
    """Those of some schedules of others, ``most`` at most; each replays, and none makes the default's nest."""
    order = sorted(similar, key=lambda s: _distance(s, workload, space.target))
    default = space.replayed(space.default())
    seen = {space.key(default)} if default is not None else set()
    found: list[Draft] = []
    for one in order[:LOOKED_AT]:
        for draft in _adapted(space, one):
            schedule = space.replayed(draft)
            if schedule is None:
                continue
            if (key := space.key(schedule)) not in seen:
                seen.add(key)
                found.append(draft)
            break
        if len(found) == most:
            break
    return found


def _distance(one: Similar, workload: Workload, target: Target) -> tuple[bool, bool, bool, float, float]:
    ours, theirs = workload.features, one.workload.features
    far = math.dist(ours, theirs) if ours and len(ours) == len(theirs) else math.inf
    is_same = one.workload.key == workload.key
    is_sized = bool(workload.sketch) and one.workload.sketch == workload.sketch
    is_elsewhere = not one.target.startswith(target_key(target))
    return is_elsewhere, not is_same, not is_sized, far, one.ratio


def _adapted(space: Space, one: Similar) -> Iterator[Draft]:
    """What of a draft of another nest this one may have: with its edits, as far as their places are here, and then
    without them."""
    try:
        draft = Draft.from_plain(one.draft)
    except (KeyError, TypeError, ValueError):
        return
    if draft.rule not in space.rules:
        return
    given, values = dict(draft.params), space.values[draft.rule]
    params = tuple((k, given[k] if given.get(k) in v else v[0]) for k, v in values.items())
    plain = replace(draft, params=params, edits=())
    sites = space.site_table(plain)
    edits = []
    for e in draft.edits:
        site = sites.get((e.kind, e.at))
        if site is not None:
            edits.append(TraceEdit(e.kind, e.at, _near(e.value, site.values)))
    if edits:
        yield replace(plain, edits=arranged(edits))
    yield plain


def _near(value: int | str, values: tuple[int | str, ...]) -> int | str:
    """The value itself where it may stand there, or that nearest to it."""
    numbers = [v for v in values if not isinstance(v, str)]
    if value in values or isinstance(value, str) or not numbers:
        return value
    return min(numbers, key=lambda v: (abs(math.log2((v + 1) / (value + 1))), v))
