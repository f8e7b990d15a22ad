"""How often the elements of a row are visited where registers hold a tile of it: what a scan gives for an element has
to be used in the visit that makes it.

Plain elements are computed again in every visit that needs them. A state up to an element cannot be, short of scanning
again, and a kernel on a GPU has no memory of its own for a row of them.
"""

from __future__ import annotations

from ..cost.rows import scanned_whole
from ..facts.fusion_nodes import FusionNode
from ..rules import Capability, can
from .group import Group


def refuse_second_reads(group: Group) -> str | None:
    """Why a group with a scan, on a GPU, would need what the scan gives in two visits of a row; None where it would
    not.

    A visit is a number: that of a node is at least that of what it reads, and one more than that of a result of a
    whole row. Scans wait for the last of their readers; where that has no end, one of those needs a result that itself
    needs the scan.
    """
    if not group.has_scan or can(group.target, Capability.KEEP_ROWS) or _is_short(group):
        return None
    visit = {m.name: 0 for m in group.nodes}
    scans = _scans_read(group)
    for _ in range(len(group.nodes) + 1):
        before = dict(visit)
        for m in group.nodes:
            visit[m.name] = max(visit[m.name], *_after(group, m, visit))
            for scan in scans[m.name]:
                visit[scan] = max(visit[scan], visit[m.name])
        if visit == before:
            return None
    latest = max(group.nodes, key=lambda m: visit[m.name])
    return f"{latest.name} needs the elements of a scan and a result of the row that is made of them"


def _is_short(group: Group) -> bool:
    size = group.domain.size(group.domain.inner_order())
    return bool(size.is_Integer) and int(size) <= scanned_whole(group.target.machine)


def _after(group: Group, m: FusionNode, visit: dict[str, int]) -> list[int]:
    """The earliest visits that what a node reads allows."""
    found = [0]
    for p in _producers(group, m):
        found.append(visit[p.name] + (group.is_inner(m) and not _of_elements(group, p)))
    return found


def _scans_read(group: Group) -> dict[str, set[str]]:
    """Of each node, the scans that it reads at its own elements, through plain elements too."""
    found: dict[str, set[str]] = {}
    # Where groups unite, one may join after its reader.
    for m in sorted(group.nodes, key=lambda m: m.index):
        found[m.name] = set()
        for p in _producers(group, m):
            if p.scan_axis is not None:
                found[m.name].add(p.name)
            elif _of_elements(group, p):
                found[m.name] |= found[p.name]
    return found


def _producers(group: Group, m: FusionNode) -> list[FusionNode]:
    names = dict.fromkeys(ld.buffer for ld in m.loads if ld.buffer in group.produced)
    return [group.produced[n] for n in names]


def _of_elements(group: Group, m: FusionNode) -> bool:
    return group.is_inner(m) and (m.monoid is None or m.scan_axis is not None)
