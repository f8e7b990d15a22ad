"""The command line of the benchmarks."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .deploy.run_deploy import USUAL, DeploySettings, pythons_option, run_deploy, runtimes_option
from .kernels.case import VARIANTS
from .kernels.registry import KERNELS
from .machine import Roofline, describe_machine, measure_roofline
from .models.registry import MODELS
from .models.spec import SIZES, Size
from .peers import FREEZE, Peer, parse_peers
from .run_compile import LAYERS, MODEL, run_compile
from .run_kernels import failed, run_kernel
from .run_kernels import meant as kernel_modes
from .run_memory import run_memory
from .run_models import MODES, meant, run_model
from .run_target import TARGET_SUITES, run_target, tell_changed
from .run_tuning import run_tuning, tuning_options
from .schema import CaseResult, Report, resume_report
from .stats import CLOCKS
from .steps import Keep, begun, newest, run_steps, stamp
from .table import print_report
from .timing import TimingSettings

# Nodes of the graphs of scaling.
NODES = (100, 300, 1000, 3000, 10000)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT = click.core.ParameterSource.DEFAULT
RESULTS = Path(__file__).resolve().parent / "results"
# What --resume is without a name.
NEWEST = ":newest"


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
        (
            "kernels",
            "models",
            "compile",
            "memory",
            "scaling",
            "generate",
            "deploy",
            "static",
            "campaign",
            "defaults",
            "predicted",
            "attention",
            "slots",
            "tuning",
        )
    ),
    required=True,
)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu")
@click.option("--runtimes", default=",".join(USUAL), callback=runtimes_option, help="Of deploy: who runs models.")
@click.option(
    "--python",
    "pythons",
    multiple=True,
    callback=pythons_option,
    help="Of deploy: RUNTIME=PATH, the interpreter that has a runtime; may be given again.",
)
@click.option(
    "--peers", default="eager,mlc,inductor", callback=peers_option, help="eager, or backends of torch.compile."
)
@click.option("--filter", "patterns", multiple=True, help="Cases whose name contains this; may be given again.")
@click.option(
    "--mode", type=click.Choice((*MODES, "both")), default="both", help="Of kernels, models, compile and memory."
)
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
@click.option("--clock", type=click.Choice(tuple(CLOCKS)), default="wall", help="Of suites that time calls, on a CPU.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch; as torch chooses them by default.")
@click.option(
    "--target",
    default="cuda:sm_90",
    help="GPU that static, campaign, defaults, predicted, attention and slots compile for; none need be here. Of "
    "attention and slots several, with commas between. Of tuning: where it is not given, the CPU.",
)
@click.option("--minutes", type=click.Choice(("10", "45")), default="10", help="Of campaign: what there is time for.")
@click.option("--stage", "stages", multiple=True, help="Of campaign: this one alone; may be given again.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=NEWEST,
    help="Go on with a file of results that a stopped run has left; without a name, with the suite's newest in --out.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of campaign: a folder of kernels that were compiled elsewhere for --target.",
)
@click.option("--tries", type=click.IntRange(min=1), default=12, help="Of defaults: schedules of a kernel.")
@click.option("--fill", is_flag=True, help="Of campaign: compile what it launches for --target into --cache, and end.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the results.")
@click.option("--plot/--no-plot", default=True, help="Write a PNG; needs matplotlib.")
@tuning_options
def main(
    suite: str,
    device: str,
    runtimes: tuple[str, ...],
    pythons: dict[str, str],
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
    clock: str,
    threads: int | None,
    target: str,
    minutes: str,
    stages: tuple[str, ...],
    resume: str | None,
    cache: Path | None,
    tries: int,
    fill: bool,
    out: Path,
    plot: bool,
    **of_tuning: Any,
) -> None:
    """Measure torch.compile backends against eager and against one another; static: what torch_mlc compiles to.

    Writes a table to the terminal, and a JSON with every sample and a PNG to the folder of results. The exit status is
    1 where a peer failed or its numbers are worse than the limit.
    """
    if device == "cuda" and suite == "deploy":
        raise click.BadParameter("deploy runs models on the CPU alone", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no GPU; use --device cpu", param_hint="--device")
    # A pipe or file has no width of its own, and rich's 80 columns would cut every cell of these tables.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    path = resumed(suite, resume, out)
    if suite == "campaign":
        campaign(minutes, size, target, stages, path, cache, fill, out, console)
        return
    if suite in TARGET_SUITES:
        with progress_bar(console) as bar:
            task = bar.add_task(suite, total=None)

            def before(name: str, names: list[str]) -> None:
                bar.update(task, description=name, total=len(names), completed=names.index(name))

            choose = partial(select, patterns=patterns)
            run_target(suite, size or "full", target, tries, choose, out, path, console, before)
        return
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("the plot needs matplotlib: pip install 'torch-mlc[bench]', or use --no-plot")
    if suite == "tuning":
        # One thread by default: teams on a machine that does other things too are noise.
        torch.set_num_threads(threads or 1)
        with progress_bar(console) as bar:
            task = bar.add_task(suite, total=None)

            def told(name: str, done: int, total: int) -> None:
                bar.update(task, description=name, total=total, completed=done)

            # Schedules of a GPU need not run: their times are predicted where there is none.
            where = "cpu" if click.get_current_context().get_parameter_source("target") == DEFAULT else target
            run_tuning(of_tuning, where, repeat or 10, out, plot, partial(select, patterns=patterns), console, told)
        return
    # Some compile with torch_mlc itself; kernels, models and compile also run where that is not installed.
    scaling = importlib.import_module(f"{__package__}.run_scaling") if suite == "scaling" else None
    generate = importlib.import_module(f"{__package__}.generate.run_generate") if suite == "generate" else None
    graphs = list(scaling.GRAPHS) if scaling is not None else []
    known = {
        "kernels": list(KERNELS),
        "models": list(MODELS),
        "memory": list(MODELS),
        "deploy": list(MODELS),
        "compile": [MODEL],
        "scaling": graphs,
        "generate": list(generate.CASES) if generate is not None else [],
    }[suite]
    chosen = select(known, patterns)
    if freeze and suite == "models":
        peers = (*peers, *(peer.frozen for peer in peers if peer.name in FREEZE))
    if threads is not None:
        torch.set_num_threads(threads)
    cuda = device == "cuda"
    size = size or ("full" if cuda else "small")
    rounds = repeat or (1 if suite in ("compile", "memory", "scaling") else 100 if cuda else 20)
    timing = TimingSettings(
        device, rounds, flush=flush if flush is not None else cuda and suite == "kernels", clock=clock
    )
    settings: dict[str, object] = {
        "peers": [peer.name for peer in peers],
        "dtype": dtype,
        "size": size,
        "dynamic": dynamic,
        "rounds": rounds,
        "least_s": timing.least_s,
        "warmup_s": timing.warmup_s,
        "flush": timing.flush,
        "clock": timing.clock,
    }
    deployed = DeploySettings(runtimes, pythons, torch.get_num_threads(), timing)
    modes = MODES if mode == "both" else (mode,)
    report = Report(
        suite=suite,
        device=device,
        machine=describe_machine(device),
        settings={"size": size, **deployed.told} if suite == "deploy" else settings,
        roofline=None,
        **begun(),
    )
    if path is None:
        path = out / f"{suite}_{device}_{stamp(report.created)}.json"
    else:
        try:
            report, changed = resume_report(path, report)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--resume") from error
        tell_changed(changed, console)
    kind = DTYPES[dtype]
    steps: dict[str, Callable[[], CaseResult | list[CaseResult]]]
    with progress_bar(console) as bar:
        if suite == "compile":
            steps = {
                f"{n} layers, {m}": partial(run_compile, n, m, peers, device, size, dynamic, rounds)
                for n in layers
                for m in modes
            }
        elif suite == "memory":
            steps = {
                f"{n}, {m}": partial(run_memory, MODELS[n], size, m, peers, kind, dynamic, device, rounds)
                for n in chosen
                for m in meant(MODELS[n], modes)
            }
        elif suite == "deploy":
            steps = {n: partial(run_deploy, MODELS[n], size, deployed) for n in chosen}
        elif scaling is not None:
            steps = {
                f"{n}, {count} nodes": partial(scaling.run_scaling, n, count, rounds) for n in chosen for count in nodes
            }
        else:
            task = bar.add_task("copy and matmul rates", total=None)
            there = report.roofline
            roofline = Roofline(**there) if there else measure_roofline(device, kind, clock)
            bar.remove_task(task)
            if generate is not None and roofline.read_bytes_per_s is None:
                roofline = replace(roofline, read_bytes_per_s=generate.read_rate(device, clock))
            report.roofline = roofline.to_json()
            last = (peers, kind, dynamic, timing, roofline)
            if generate is not None:
                last = (size, peers, kind, timing, roofline.read_bytes_per_s)
                steps = {n: partial(generate.run_generate, generate.CASES[n], *last) for n in chosen}
            elif suite == "kernels":
                variants = VARIANTS if variant == "both" else (variant,)
                steps = {
                    f"{n}, {v}" + (", training" if m == "training" else ""): partial(
                        run_kernel, KERNELS[n], v, m, *last
                    )
                    for n in chosen
                    for v in variants
                    for m in kernel_modes(KERNELS[n], modes)
                }
            else:
                steps = {
                    f"{n}, {m}": partial(run_model, MODELS[n], size, m, *last)
                    for n in chosen
                    for m in meant(MODELS[n], modes)
                }
        task = bar.add_task(suite, total=len(steps))
        names = list(steps)

        def told(name: str) -> None:
            bar.update(task, description=name, completed=names.index(name))

        run_steps(report, {n: partial(add_cases, report, step) for n, step in steps.items()}, path, told)
    finish(report, path, plot, console)


def add_cases(report: Report, step: Callable[[], CaseResult | list[CaseResult]], _: Keep) -> None:
    """Take a step, whose cases are results of the run."""
    cases = step()
    report.cases += cases if isinstance(cases, list) else [cases]


def resumed(suite: str, resume: str | None, out: Path) -> Path | None:
    """The file that a run goes on with: the one that is named, or the newest of the suite. None for a new run."""
    if resume is None:
        return None
    kind = "jsonl" if suite == "campaign" else "json"
    path = newest(out, f"{suite}_*.{kind}") if resume == NEWEST else Path(resume)
    if path is None or not path.is_file():
        missing = f"{suite}_*.{kind} in {out}" if path is None else path
        raise click.BadParameter(f"there is no {missing} to go on with", param_hint="--resume")
    return path


def campaign(
    minutes: str,
    size: Size | None,
    target: str,
    stages: tuple[str, ...],
    resume: Path | None,
    cache: Path | None,
    fill: bool,
    out: Path,
    console: Console,
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
    sys.exit(command.campaign(int(minutes), size, target, stages, resume, cache, fill, out, console))


def finish(report: Report, path: Path, plot: bool, console: Console) -> None:
    """Print and draw a report that is written; exit with 1 where something failed."""
    print_report(report, console)
    console.print(f"wrote {path}", soft_wrap=True)
    if plot:
        # matplotlib belongs to the extra `bench` and takes a second to load, so only a run that draws imports it.
        importlib.import_module(f"{__package__}.plot").write_plot(report, path.with_suffix(".png"))
        console.print(f"wrote {path.with_suffix('.png')}", soft_wrap=True)
    wrong = [
        f"{case.name}, {case.variant}, {case.mode}: {', '.join(w)}" for case in report.cases if (w := failed(case))
    ]
    wrong += [f"{name}: {why}" for name, why in report.progress.failed.items()]
    for line in wrong:
        console.print(f"failed or not within the error limit: {line}", style="bold red")
    if wrong:
        sys.exit(1)
