"""The command line of the benchmarks."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .kernels.case import VARIANTS
from .kernels.registry import KERNELS
from .machine import describe_machine, describe_versions, measure_roofline
from .models.registry import MODELS
from .models.spec import SIZES, Size
from .peers import FREEZE, Peer, parse_peers
from .run_compile import LAYERS, MODEL, run_compile
from .run_kernels import failed, run_kernel
from .run_memory import run_memory
from .run_models import MODES, meant, run_model
from .schema import Report
from .table import print_report
from .timing import TimingSettings

# Nodes of the graphs of scaling.
NODES = (100, 300, 1000, 3000, 10000)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESULTS = Path(__file__).resolve().parent / "results"


def select(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that contain one of the patterns; all without patterns. Raises: click.BadParameter if one finds nothing."""
    names = list(names)
    for pattern in patterns:
        if not any(pattern in name for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise click.BadParameter(f"{pattern!r} is in no case's name; {hint}the cases are {', '.join(names)}")
    return [name for name in names if not patterns or any(pattern in name for pattern in patterns)]


def peers_option(_: click.Context, __: click.Parameter, text: str) -> tuple[Peer, ...]:
    try:
        return parse_peers(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def layers_option(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 2,12,48") from error
    if not layers or min(layers) < 1:
        raise click.BadParameter(f"{text!r}: a model has at least one layer, a graph one node")
    return layers


def progress_bar(console: Console) -> Progress:
    text = TextColumn("{task.description}")
    return Progress(text, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True)


@click.command(context_settings={"show_default": True})
@click.option(
    "--suite",
    type=click.Choice(
        ("kernels", "models", "compile", "memory", "scaling", "static", "campaign", "defaults", "predicted")
    ),
    required=True,
)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu")
@click.option("--peers", default="eager,inductor", callback=peers_option, help="eager, or backends of torch.compile.")
@click.option("--filter", "patterns", multiple=True, help="Cases whose name contains this; may be given again.")
@click.option("--mode", type=click.Choice((*MODES, "both")), default="both", help="Of models, compile and memory.")
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="float32", help="Of kernels, models and memory.")
@click.option(
    "--size",
    type=click.Choice(SIZES),
    help="Of models, compile and memory: small on the CPU, full on a GPU; of static: full; of campaign: tiny or full.",
)
@click.option("--variant", type=click.Choice((*VARIANTS, "both")), default="both", help="Sizes of kernels.")
@click.option("--layers", default=",".join(map(str, LAYERS)), callback=layers_option, help="Depths of compile.")
@click.option("--nodes", default=",".join(map(str, NODES)), callback=layers_option, help="Sizes of scaling.")
@click.option(
    "--freeze", is_flag=True, help="Of models: peers that can are also run with parameters that do not change."
)
@click.option("--dynamic", is_flag=True, help="Compile with dynamic=True.")
@click.option(
    "--repeat", type=click.IntRange(min=1), help="Rounds: 20 on the CPU, 100 on a GPU; 1 for compile and memory."
)
@click.option("--flush/--no-flush", default=None, help="Empty caches before each call; on for kernels on a GPU.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch; as torch chooses them by default.")
@click.option(
    "--target",
    default="cuda:sm_90",
    help="GPU that static, campaign, defaults and predicted compile for; none need be here.",
)
@click.option("--minutes", type=click.Choice(("10", "45")), default="10", help="Of campaign: what there is time for.")
@click.option("--stage", "stages", multiple=True, help="Of campaign: this one alone; may be given again.")
@click.option("--resume", is_flag=True, help="Of campaign: go on with the last one in the folder of results.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of campaign: a folder of kernels that were compiled elsewhere for --target.",
)
@click.option("--tries", type=click.IntRange(min=1), default=12, help="Of defaults: schedules of a kernel.")
@click.option("--fill", is_flag=True, help="Of campaign: compile what it launches for --target into --cache, and end.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the results.")
@click.option("--plot/--no-plot", default=True, help="Write a PNG; needs matplotlib.")
def main(
    suite: str,
    device: str,
    peers: tuple[Peer, ...],
    patterns: tuple[str, ...],
    mode: str,
    dtype: str,
    size: Size | None,
    variant: str,
    layers: tuple[int, ...],
    nodes: tuple[int, ...],
    freeze: bool,
    dynamic: bool,
    repeat: int | None,
    flush: bool | None,
    threads: int | None,
    target: str,
    minutes: str,
    stages: tuple[str, ...],
    resume: bool,
    cache: Path | None,
    tries: int,
    fill: bool,
    out: Path,
    plot: bool,
) -> None:
    """Measure torch.compile backends against eager and against one another; static: what torch_mlc compiles to.

    Writes a table to the terminal, and a JSON with every sample and a PNG to the folder of results. The exit status is
    1 where a peer failed or its numbers are worse than the limit.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no GPU; use --device cpu", param_hint="--device")
    if suite == "static":
        static(size or "full", patterns, target, out)
        return
    if suite == "campaign":
        campaign(minutes, size, target, stages, resume, cache, fill, out)
        return
    if suite == "defaults":
        defaults(size or "full", patterns, target, tries, out)
        return
    if suite == "predicted":
        predicted(size or "full", patterns, target, out)
        return
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("the plot needs matplotlib: pip install 'torch-mlc[bench]', or use --no-plot")
    # It compiles with torch_mlc itself; kernels, models and compile also run where that is not installed.
    scaling = importlib.import_module(f"{__package__}.run_scaling") if suite == "scaling" else None
    graphs = list(scaling.GRAPHS) if scaling is not None else []
    known = {
        "kernels": list(KERNELS),
        "models": list(MODELS),
        "memory": list(MODELS),
        "compile": [MODEL],
        "scaling": graphs,
    }[suite]
    chosen = select(known, patterns)
    if freeze and suite == "models":
        peers = (*peers, *(peer.frozen for peer in peers if peer.name in FREEZE))
    if threads is not None:
        torch.set_num_threads(threads)
    cuda = device == "cuda"
    size = size or ("full" if cuda else "small")
    rounds = repeat or (1 if suite in ("compile", "memory", "scaling") else 100 if cuda else 20)
    timing = TimingSettings(device, rounds, flush=flush if flush is not None else cuda and suite == "kernels")
    modes = MODES if mode == "both" else (mode,)
    # A pipe or file has no width of its own, and rich's 80 columns would cut every cell of these tables.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    report = Report(
        suite=suite,
        device=device,
        command=["python", "-m", "benchmarks", *sys.argv[1:]],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(device),
        versions=describe_versions(),
        settings={
            "peers": [peer.name for peer in peers],
            "dtype": dtype,
            "size": size,
            "dynamic": dynamic,
            "rounds": rounds,
            "least_s": timing.least_s,
            "warmup_s": timing.warmup_s,
            "flush": timing.flush,
        },
        roofline=None,
    )
    with progress_bar(console) as bar:
        if suite == "compile":
            task = bar.add_task("compile", total=len(layers) * len(modes))
            for depth in layers:
                for m in modes:
                    bar.update(task, description=f"{depth} layers, {m}")
                    report.cases += run_compile(depth, m, peers, device, size, dynamic, rounds)
                    bar.advance(task)
        elif suite == "memory":
            task = bar.add_task("memory", total=sum(len(meant(MODELS[n], modes)) for n in chosen))
            for name in chosen:
                for m in meant(MODELS[name], modes):
                    bar.update(task, description=f"{name}, {m}")
                    case = run_memory(MODELS[name], size, m, peers, DTYPES[dtype], dynamic, device, rounds)
                    report.cases.append(case)
                    bar.advance(task)
        elif scaling is not None:
            task = bar.add_task("scaling", total=len(chosen) * len(nodes))
            for name in chosen:
                for count in nodes:
                    bar.update(task, description=f"{name}, {count} nodes")
                    report.cases.append(scaling.run_scaling(name, count, rounds))
                    bar.advance(task)
        else:
            task = bar.add_task("copy and matmul rates", total=None)
            roofline = measure_roofline(device, DTYPES[dtype])
            report.roofline = roofline.to_json()
            variants = VARIANTS if variant == "both" else (variant,)
            steps = {n: variants if suite == "kernels" else meant(MODELS[n], modes) for n in chosen}
            bar.update(task, total=sum(map(len, steps.values())))
            for name in chosen:
                for step in steps[name]:
                    bar.update(task, description=f"{name}, {step}")
                    if suite == "kernels":
                        case = run_kernel(KERNELS[name], step, peers, DTYPES[dtype], dynamic, timing, roofline)
                    else:
                        case = run_model(MODELS[name], size, step, peers, DTYPES[dtype], dynamic, timing, roofline)
                    report.cases.append(case)
                    bar.advance(task)
    finish(report, out, plot, console)


def static(size: Size, patterns: tuple[str, ...], target: str, out: Path) -> None:
    """Compile for a GPU and tell figures and targets; exit with 1 where something did not compile."""
    suite = _compiling("static", "run")

    def run(names: list[str], target: str, before: Callable[[str], None]) -> Any:
        return suite.run_static(names, size, target, before)

    cross_compiled("static", patterns, target, out, run, suite.print_static)


def defaults(size: Size, patterns: tuple[str, ...], target: str, tries: int, out: Path) -> None:
    """Compare default schedules with others for a GPU; exit with 1 where something did not compile."""
    suite = _compiling("defaults", "defaults")

    def run(names: list[str], target: str, before: Callable[[str], None]) -> Any:
        return suite.run_defaults(names, size, target, tries, before)

    cross_compiled("defaults", patterns, target, out, run, suite.print_defaults)


def predicted(size: Size, patterns: tuple[str, ...], target: str, out: Path) -> None:
    """Predict our kernels and Inductor's for a GPU; exit with 1 where something was not compared."""
    suite = _compiling("predicted", "beside")

    def run(names: list[str], target: str, before: Callable[[str], None]) -> Any:
        return suite.run_predicted(names, size, target, before)

    cross_compiled("predicted", patterns, target, out, run, suite.print_predicted)


def _compiling(suite: str, module: str) -> Any:
    """A module of the suites that compile for a GPU. Every other suite also runs where torch_mlc is not installed."""
    if importlib.util.find_spec("torch_mlc") is None or importlib.util.find_spec("triton") is None:
        raise click.UsageError(f"{suite} compiles with torch_mlc for a GPU: pip install torch-mlc triton")
    return importlib.import_module(f"{__package__}.static.{module}")


def cross_compiled(
    suite: str,
    patterns: tuple[str, ...],
    target: str,
    out: Path,
    run: Callable[[list[str], str, Callable[[str], None]], Any],
    show: Callable[[Any, Console], None],
) -> None:
    """Run a suite over static workloads, by names, target, and what is called ahead of each; print and write it."""
    known = _compiling(suite, "run")
    names = select(known.WORKLOADS, patterns)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    with progress_bar(console) as bar:
        task = bar.add_task(suite, total=len(names))

        def before(name: str) -> None:
            bar.update(task, description=name, completed=names.index(name))

        try:
            report = run(names, target, before)
        except known.TargetError as error:
            raise click.BadParameter(str(error), param_hint="--target") from error
    show(report, console)
    when = report.created.replace(":", "").replace("+0000", "Z")
    path = out / f"{suite}_{target.partition(':')[2].replace('_', '')}_{when}.json"
    report.write(path)
    console.print(f"wrote {path}", soft_wrap=True)
    if report.failed:
        sys.exit(1)


def campaign(
    minutes: str,
    size: Size | None,
    target: str,
    stages: tuple[str, ...],
    resume: bool,
    cache: Path | None,
    fill: bool,
    out: Path,
) -> None:
    """Everything that a GPU can tell, in processes that may crash; exit with 1 where something was wrong or lost."""
    if importlib.util.find_spec("torch_mlc") is None or importlib.util.find_spec("triton") is None:
        raise click.UsageError("campaign is about torch_mlc on a GPU: pip install torch-mlc triton")
    command = importlib.import_module(f"{__package__}.campaign.command")
    if unknown := [s for s in stages if s not in command.STAGES]:
        near = difflib.get_close_matches(unknown[0], command.STAGES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise click.BadParameter(
            f"{unknown[0]!r}; {hint}the stages are {', '.join(command.STAGES)}", param_hint="--stage"
        )
    console = Console() if sys.stdout.isatty() else Console(width=200)
    sys.exit(command.campaign(int(minutes), size, target, stages, resume, cache, fill, out, console))


def finish(report: Report, out: Path, plot: bool, console: Console) -> None:
    """Print, write and draw a report; exit with 1 where something failed."""
    print_report(report, console)
    stem = f"{report.suite}_{report.device}_{report.created.replace(':', '').replace('+0000', 'Z')}"
    report.write(out / f"{stem}.json")
    console.print(f"wrote {out / stem}.json", soft_wrap=True)
    if plot:
        # matplotlib belongs to the extra `bench` and takes a second to load, so only a run that draws imports it.
        importlib.import_module(f"{__package__}.plot").write_plot(report, out / f"{stem}.png")
        console.print(f"wrote {out / stem}.png", soft_wrap=True)
    wrong = [
        f"{case.name}, {case.variant}, {case.mode}: {', '.join(w)}" for case in report.cases if (w := failed(case))
    ]
    for line in wrong:
        console.print(f"failed or not within the error limit: {line}", style="bold red")
    if wrong:
        sys.exit(1)
