"""Reports as pictures: speed-ups and achieved rates by case, compile time by phase, or peaks of memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from .peers import EAGER
from .schema import CaseResult, Report
from .table import BOUND_BY_BYTES, PHASES, mebibytes, sized

# Colours that stay apart for the colour-blind (Okabe and Ito).
COLOURS = {"eager": "#7f7f7f", "inductor": "#0072B2", "mlc": "#D55E00"}
OTHERS = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00")
PHASE_COLOURS = dict(zip(PHASES, ("#56B4E9", "#009E73", "#D55E00", "#BBBBBB")))


def colours(names: list[str]) -> dict[str, str]:
    others = iter(OTHERS * len(names))
    return {name: COLOURS.get(name) or next(others) for name in names}


def label(case: CaseResult, suite: str) -> str:
    return f"{case.name} · {sized(case) if suite in BOUND_BY_BYTES else case.mode}"


def write_plot(report: Report, path: Path) -> None:
    """Draw ``report`` into a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = {"compile": draw_compile, "scaling": draw_scaling, "memory": draw_memory, "deploy": draw_deploy}
    draw = others.get(report.suite, draw_timing)
    figure = draw(report)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def caption(report: Report) -> str:
    torch_version = report.versions.get("torch")
    dtype = report.cases[0].dtype if report.cases else ""
    threads = report.machine.get("torch_threads")
    place = report.machine.get("gpu") or f"{report.machine.get('processor')}, {threads} threads"
    return f"{report.suite} · {dtype} · {place} · torch {torch_version} · {report.created[:10]}"


def draw_timing(report: Report) -> Any:
    """Left: speed-up of each peer over eager (filled) and over Inductor (hollow). Right: achieved rate and its roof."""
    cases, names = report.cases, report.peer_names()
    colour = colours(names)
    height = max(3.5, 0.24 * len(cases) + 2.0)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, height), sharey=True, layout="constrained", width_ratios=(1, 1)
    )
    rows = list(range(len(cases)))
    for name in names:
        for base, face in ((EAGER, colour[name]), ("inductor", "white")):
            ratios = [(row, r) for row, case in zip(rows, cases) if (r := case.ratio(name, base)) is not None]
            if name in (EAGER, base) or not ratios:
                continue
            mean = report.geomeans().get(f"{name}/{base}")  # None where all times are unsteady
            told = "" if mean is None else f", geomean {mean.value:.2f}× of {mean.count}"
            left.scatter(
                [r for _, r in ratios],
                [row for row, _ in ratios],
                s=34,
                color=face,
                edgecolors=colour[name],
                linewidths=1.3,
                zorder=3,
                label=f"{name} over {base}{told}",
            )
    left.axvline(1.0, color="black", linewidth=0.9)
    left.margins(x=0.08)
    left.set_xscale("log")
    low, high = left.get_xlim()
    left.set_xlim(min(0.45, low), max(2.2, high))
    log_ticks(left, "×")
    left.set_xlabel("speed-up (right of 1× is faster)")
    draw_rates(report, right, colour)
    left.set_yticks(rows, [label(case, report.suite) for case in cases], fontsize=8)
    left.set_ylim(len(cases) - 0.5, -0.5)
    for axes in (left, right):
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        for row in rows[::2]:
            axes.axhspan(row - 0.5, row + 0.5, color="#f5f5f5", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            axes.legend(
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                fontsize=8,
                frameon=False,
                ncols=3 if axes is right else 1,
            )
    figure.suptitle(caption(report), fontsize=10)
    return figure


def log_ticks(axes: Any, unit: str) -> None:
    """Plain numbers at 1, 2 and 5 of each decade, or at the decades alone where there are more than three."""
    low, high = axes.get_xlim()
    steps = (1.0, 2.0, 5.0) if low > 0 and high / low < 1e3 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}{unit}")
    axes.xaxis.set_minor_locator(NullLocator())


def draw_rates(report: Report, axes: Any, colour: dict[str, str]) -> None:
    """Compulsory bytes (kernels, generate) or matmul flops (models) over time, with the rate measured in the same run
    as roof."""
    moved = BOUND_BY_BYTES.get(report.suite)
    unit = "GB/s" if moved else "GFLOP/s"
    if not any(case.nbytes if moved else case.flops for case in report.cases):
        axes.set_axis_off()  # nothing to show, and a logarithmic axis of nothing cannot be drawn
        return
    for name, tint in colour.items():
        points = []
        for row, case in enumerate(report.cases):
            amount = case.nbytes if moved else case.flops
            time = case.peers[name].time if name in case.peers else None
            if amount and time:
                points.append((amount / time.median / 1e9, row, amount / time.q75 / 1e9, amount / time.q25 / 1e9))
        axes.hlines([p[1] for p in points], [p[2] for p in points], [p[3] for p in points], color=tint, linewidth=1)
        axes.scatter([p[0] for p in points], [p[1] for p in points], s=26, color=tint, zorder=3, label=name)
    if report.roofline is not None:
        what = moved or "matmul"
        roof = report.roofline[f"{moved}_bytes_per_s" if moved else "matmul_flops_per_s"] / 1e9
        axes.axvline(roof, color="black", linestyle="--", linewidth=1, label=f"{what}, measured: {roof:.3g} {unit}")
    axes.set_xscale("log")
    log_ticks(axes, "")
    axes.set_xlabel(f"{'compulsory bytes' if moved else 'flops of products'} per second, {unit} (bars: quartiles)")


def draw_compile(report: Report) -> Any:
    """Stacked seconds of the first call by phase, one bar for each case and peer."""
    bars = [(case, name, peer) for case in report.cases for name, peer in case.peers.items() if peer.time]
    figure, axes = plt.subplots(figsize=(11, max(3.0, 0.34 * len(bars) + 1.6)), layout="constrained")
    for row, (_, _, peer) in enumerate(bars):
        left = 0.0
        for phase in PHASES:
            width = max(0.0, peer.phases.get(phase, 0.0))
            axes.barh(row, width, left=left, color=PHASE_COLOURS[phase], label=phase if row == 0 else None)
            left += width
        total = peer.time.median if peer.time else 0.0
        axes.text(left, row, f" {total:.1f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{c.variant}, {c.mode} · {name}" for c, name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the first call (phases of the last repeat; label: median total)")
    axes.spines[["top", "right"]].set_visible(False)
    if bars:
        axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(caption(report), fontsize=10)
    return figure


def draw_scaling(report: Report) -> Any:
    """Seconds against nodes, both on logarithmic axes, one line a graph, and n log n from the first point of each."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    names = list(dict.fromkeys(c.name for c in report.cases))
    for name, tint in colours(names).items():
        cases = [c for c in report.cases if c.name == name and c.peers["mlc"].time]
        points = sorted((c.peers["mlc"].counts["all"]["nodes"], t.median) for c in cases if (t := c.peers["mlc"].time))
        if not points:
            continue
        sizes = [n for n, _ in points]
        first, begin = points[0]
        axes.plot(sizes, [s for _, s in points], marker="o", markersize=4, color=tint, label=name)
        ideal = [begin * n * math.log(n) / (first * math.log(first)) for n in sizes]
        axes.plot(sizes, ideal, color=tint, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("nodes of the ATen graph")
    axes.set_ylabel("seconds of the processor, cold (dotted: n log n from the first point)")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(caption(report), fontsize=10)
    return figure


def draw_memory(report: Report) -> Any:
    """Peaks of every peer as shares of eager's, one line a case; what is held besides is the case's label."""
    cases, names = report.cases, report.peer_names()
    figure, axes = plt.subplots(figsize=(9, max(3.0, 0.26 * len(cases) + 1.8)), layout="constrained")
    for name, tint in colours(names).items():
        points = [(1 / r, row) for row, case in enumerate(cases) if (r := case.ratio(name, EAGER)) is not None]
        mean = report.geomeans().get(f"{name}/{EAGER}")
        told = name if mean is None else f"{name}, geomean {1 / mean.value:.2f}× of {mean.count}"
        axes.scatter([x for x, _ in points], [row for _, row in points], s=30, color=tint, zorder=3, label=told)
    axes.axvline(1.0, color="black", linewidth=0.9)
    axes.set_xlim(left=0)
    labels = [f"{label(case, report.suite)} ({mebibytes(case.nbytes)} MiB held)" for case in cases]
    axes.set_yticks(range(len(cases)), labels, fontsize=8)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlabel("peak memory of a call beyond weights and inputs, as a share of eager's (left of 1 is less)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False, ncols=3)
    figure.suptitle(caption(report), fontsize=10)
    return figure


def draw_deploy(report: Report) -> Any:
    """Speed-ups of every runtime over eager, and what each process has held, one line a model."""
    cases, names = report.cases, report.peer_names()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, max(3.0, 0.32 * len(cases) + 1.8)), layout="constrained", sharey=True
    )
    for name, tint in colours(names).items():
        sped = [(r, row) for row, case in enumerate(cases) if (r := case.ratio(name, EAGER)) is not None]
        mean = report.geomeans().get(f"{name}/{EAGER}")
        told = name if mean is None else f"{name}, geomean {mean.value:.2f}× of {mean.count}"
        left.scatter([x for x, _ in sped], [row for _, row in sped], s=30, color=tint, zorder=3, label=told)
        held = [(case.peers[name].counts.get("process"), row) for row, case in enumerate(cases) if name in case.peers]
        points = [(h["resident"] / 2**20, row) for h, row in held if h]
        right.scatter([x for x, _ in points], [row for _, row in points], s=30, color=tint, zorder=3)
    left.axvline(1.0, color="black", linewidth=0.9)
    for axes, unit, text in ((left, "×", "calls: times eager's speed"), (right, "", "memory of the process, MiB")):
        if len(axes.collections) and any(len(c.get_offsets()) for c in axes.collections):
            axes.set_xscale("log")
            log_ticks(axes, unit)
        axes.set_xlabel(text)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yticks(range(len(cases)), [f"{c.name} ({mebibytes(c.nbytes)} MiB)" for c in cases], fontsize=8)
    left.set_ylim(len(cases) - 0.5, -0.5)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False, ncols=2)
    figure.suptitle(caption(report), fontsize=10)
    return figure
