"""Reports as rich tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .peers import EAGER
from .schema import CaseResult, PeerResult, Report

# Suites whose cases are set against the bytes that they have to move, and the rate that these are moved at.
BOUND_BY_BYTES = {"kernels": "copy", "generate": "read"}


def sized(case: CaseResult) -> str:
    """The size of a kernel, and what is done beside inference."""
    return case.variant if case.mode == "inference" else f"{case.variant}, {case.mode}"


def seconds(value: float | None) -> str:
    """Three significant digits with a unit that fits."""
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def ratio_text(ratio: float | None) -> Text:
    """A speed-up: green where faster, red below 0.9."""
    if ratio is None:
        return Text("-", style="dim")
    return Text(f"{ratio:.2f}×", style="green" if ratio > 1.0 else "red" if ratio < 0.9 else "")


def time_text(peer: PeerResult) -> Text:
    """Median and half the interquartile range as a share of it; the error where there is one."""
    if peer.error is not None or peer.time is None:
        return Text((peer.error or "not run").splitlines()[0][:40], style="red")
    median, q25, q75 = peer.time
    text = Text(seconds(median))
    if len(peer.samples) > 1:
        unsteady = peer.is_unsteady
        text.append(f" ±{(q75 - q25) / 2 / median:.0%}{' unsteady' if unsteady else ''}", "red" if unsteady else "dim")
    return text


def accuracy_text(case: CaseResult, name: str) -> Text:
    """Error over eager's own; red with the tensor's name where it is over the limit."""
    accuracy = case.peers[name].accuracy
    if accuracy is None:
        return Text("-", style="dim")
    if accuracy["ok"]:
        return Text(f"{accuracy['error']:.0e}", style="dim")
    return Text(f"{accuracy['error']:.0e} > {accuracy['limit']:.0e} {accuracy['worst']}", style="bold red")


def counts_text(peer: PeerResult) -> str:
    """Kernels generated forward+backward, and library calls where the backend counts them."""
    kernels = [c["kernels_generated"] for c in peer.counts.values() if "kernels_generated" in c]
    if not kernels:
        return "-"
    calls = [c["library_calls"] for c in peer.counts.values() if "library_calls" in c]
    return "+".join(map(str, kernels)) + (f" ({'+'.join(map(str, calls))} lib)" if calls else "")


def timing_table(report: Report) -> Table:
    """The table of the suites ``kernels``, ``models`` and ``generate``."""
    moved = report.suite in BOUND_BY_BYTES
    table = Table(title=f"{report.suite} on {report.device}: medians, ± half the interquartile range", title_style="")
    table.add_column("case", no_wrap=True)
    table.add_column("size", no_wrap=True)
    if not moved:
        table.add_column("mode")
    table.add_column("MiB" if moved else "GFLOP", justify="right")
    table.add_column("floor", justify="right")
    names = report.peer_names()
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("share", justify="right")
        if name != EAGER:
            table.add_column("times eager's speed", justify="right")
            if name != "inductor" and "inductor" in names:
                table.add_column("times Inductor's speed", justify="right")
            table.add_column("error", justify="right")
            table.add_column("kernels", justify="right")
    for case in report.cases:
        size = (case.nbytes or 0) / 2**20 if moved else (case.flops or 0) / 1e9
        row: list[Text | str] = [case.name, sized(case)] if moved else [case.name, case.variant, case.mode]
        row += [f"{size:.3g}", seconds(case.floor_s)]
        for name in names:
            share = case.share(name)
            row += [time_text(case.peers[name]), f"{share:.0%}" if share is not None else "-"]
            if name != EAGER:
                row.append(ratio_text(case.ratio(name, EAGER)))
                if name != "inductor" and "inductor" in names:
                    row.append(ratio_text(case.ratio(name, "inductor")))
                row += [accuracy_text(case, name), counts_text(case.peers[name])]
        table.add_row(*row)
    return table


def compile_table(report: Report) -> Table:
    """The table of the suite ``compile``: first call in all and by phase."""
    table = Table(title=f"first call, {report.device}: fresh processes; cold = empty caches", title_style="")
    for column in ("model", "case", "mode", "peer"):
        table.add_column(column)
    for column in ("total", "times Inductor's speed", *PHASES, "kernels"):
        table.add_column(column, justify="right")
    for case in report.cases:
        for name, peer in case.peers.items():
            phases = [seconds(peer.phases.get(phase)) for phase in PHASES]
            ratio = ratio_text(case.ratio(name, "inductor")) if name != "inductor" else Text("")
            table.add_row(case.name, case.variant, case.mode, name, time_text(peer), ratio, *phases, counts_text(peer))
    return table


def own_table(report: Report) -> Table:
    """torch-mlc's own seconds of the suite ``compile``, each kind of graph by phase, against what is asked of them."""
    names = dict.fromkeys(k.split(": ")[-1] for c in report.cases for p in c.peers.values() for k in own_phases(p))
    table = Table(title="torch-mlc's own part, seconds by phase", title_style="")
    for column in ("case", "mode", "graph"):
        table.add_column(column)
    for column in ("all", "limit", *names):
        table.add_column(column, justify="right")
    for case in report.cases:
        for peer in case.peers.values():
            own = own_phases(peer)
            total = sum(own.values())
            limit = own_limit(report, case)
            for kind in dict.fromkeys(k.split(": ")[0] for k in own):
                part = {k.split(": ")[1]: s for k, s in own.items() if k.startswith(f"{kind}: ")}
                cells = [seconds(part.get(n)) for n in names]
                table.add_row(case.variant, case.mode, kind, seconds(sum(part.values())), "", *cells)
            if own and limit is not None:
                style = "bold red" if total > limit else ""
                table.add_row(case.variant, case.mode, "together", Text(f"{total:.2f} s", style), f"{limit:.2f} s")
    return table


# Seconds of our own part. Deep: how much longer the deepest model may take than the one in the middle.
OWN_LIMITS = {"cold": 2.5, "warm": 0.5}
OWN_DEEPER = 1.3


def own_phases(peer: PeerResult) -> dict[str, float]:
    """Seconds under ``"forward: fuse"`` and the like."""
    return {k.removeprefix("own: "): s for k, s in peer.phases.items() if k.startswith("own: ")}


def own_limit(report: Report, case: CaseResult) -> float | None:
    """The limit of a case of 12 layers; of 48, by the time of 12 in the same mode and state; None for other depths."""
    depth, state = case.variant.split(" layers, ")
    if depth == "12":
        return OWN_LIMITS[state]
    same = [c for c in report.cases if c.variant == f"12 layers, {state}" and c.mode == case.mode]
    times = [sum(own_phases(p).values()) for c in same for p in c.peers.values() if own_phases(p)]
    return times[0] * OWN_DEEPER if depth == "48" and times else None


def scaling_table(report: Report) -> Table:
    """The table of the suite ``scaling``: seconds of the processor, in all and of each node, and seconds by phase."""
    names = dict.fromkeys(k for c in report.cases for p in c.peers.values() for k in p.phases)
    table = Table(title="torch-mlc's own compile time from an empty cache, seconds of the processor", title_style="")
    table.add_column("graph")
    for column in ("nodes", "all", "each node", *names):
        table.add_column(column, justify="right")
    for case in report.cases:
        peer = case.peers["mlc"]
        nodes, time = peer.counts["all"]["nodes"], peer.time
        each = seconds(time.median / nodes) if time else ""
        table.add_row(case.name, str(nodes), time_text(peer), each, *(seconds(peer.phases.get(n)) for n in names))
    return table


def mebibytes(nbytes: int | None) -> str:
    """Three significant digits."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.3g}"


def share_text(ratio: float | None) -> Text:
    """Memory as a share of another's: green where less, red where more."""
    if ratio is None:
        return Text("-", style="dim")
    share = 1 / ratio
    return Text(f"{share:.2f}×", style="green" if share < 0.995 else "red" if share > 1.005 else "")


def memory_table(report: Report) -> Table:
    """The table of the suite ``memory``: peaks beyond what is held before the call, and shares of other peers'."""
    title = f"peak memory of a call on {report.device} beyond weights and inputs (held), MiB"
    table = Table(title=title, title_style="")
    for column in ("model", "size", "mode"):
        table.add_column(column, no_wrap=True)
    names = report.peer_names()
    bases = [b for b in (EAGER, "inductor") if b in names]
    for column in ("held", *names, *(f"{n} of {b}" for b in bases for n in names if n not in (EAGER, b))):
        table.add_column(column, justify="right")
    for case in report.cases:
        row: list[Text | str] = [case.name, case.variant, case.mode, mebibytes(case.nbytes)]
        for peer in case.peers.values():
            failed = Text((peer.error or "").splitlines()[0][:40], style="red") if peer.error else None
            row.append(failed or mebibytes(peer.peak_bytes))
        row += [share_text(case.ratio(n, b)) for b in bases for n in names if n not in (EAGER, b)]
        table.add_row(*row)
    return table


def deploy_table(report: Report) -> Table:
    """The table of the suite ``deploy``: what runs, how fast, and what it takes along."""
    table = Table(title="exported models, each in a process of its own; MiB", title_style="")
    table.add_column("model", no_wrap=True)
    for column in ("runtime", "call", "times eager's speed", "error"):
        table.add_column(column, justify="right")
    for column in ("to write", "files", "weights", "to import", "open and first call", "process"):
        table.add_column(column, justify="right")
    for case in report.cases:
        for name, peer in case.peers.items():
            row: list[Text | str] = [case.name, name, time_text(peer)]
            row += [ratio_text(case.ratio(name, EAGER)) if name != EAGER else "", accuracy_text(case, name)]
            row += [seconds(peer.phases.get("write")), mebibytes(peer.counts.get("files", {}).get("bytes"))]
            row += [mebibytes(case.nbytes), seconds(peer.phases.get("import")), seconds(peer.first_call_s)]
            table.add_row(*row, mebibytes(peer.counts.get("process", {}).get("resident")))
    return table


PHASES: Sequence[str] = ("dynamo", "aot", "backend", "rest")


def print_report(report: Report, console: Console) -> None:
    """The table, the geometric means with their counts, and the measured rates."""
    match report.suite:
        case "compile":
            console.print(compile_table(report))
            if any(own_phases(p) for c in report.cases for p in c.peers.values()):
                console.print(own_table(report))
        case "scaling":
            console.print(scaling_table(report))
        case "memory":
            console.print(memory_table(report))
        case "deploy":
            console.print(deploy_table(report))
        case _:
            console.print(timing_table(report))
    for name, mean in report.geomeans().items():
        what, value = ("peaks", 1 / mean.value) if report.suite == "memory" else ("speed-ups", mean.value)
        left = report.unsteady(*name.split("/"))
        without = f"; without {left} whose times vary by more than a third" if left else ""
        console.print(f"{name}: geometric mean of {mean.count} {what} {value:.3f}×{without}")
    if report.roofline is not None:
        copy, matmul = report.roofline["copy_bytes_per_s"], report.roofline["matmul_flops_per_s"]
        read = report.roofline.get("read_bytes_per_s")
        told = f"copy {copy / 1e9:.3g} GB/s, matmul {matmul / 1e9:.4g} GFLOP/s"
        console.print(f"measured here: {told}{f', read {read / 1e9:.3g} GB/s' if read else ''}", style="dim")
