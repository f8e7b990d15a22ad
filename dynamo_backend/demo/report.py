"""What the demo prints at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one run. Losses in nats a character, times in seconds; `counts` are the training graphs' counters."""

    backend: str
    losses: Mapping[str, Sequence[float]]
    held_out: Mapping[str, float]
    first_step: Mapping[str, float]
    step: Mapping[str, float]
    no_inductor: str | None
    counts: Mapping[str, int]
    rounds: int


def show_sample(console: Console, prompt: str, written: str) -> None:
    """The end of the passage that the model was given, dim, then what it wrote."""
    text = Text(prompt[-80:], style="dim") + Text(written, style="default")
    console.print(Panel(text, title="given (dim), then written by the model", title_align="left"))


def show_comparison(console: Console, found: Measured) -> None:
    console.print(_losses(found))
    console.print(_speeds(found))
    console.print(_compiled(found))
    if found.no_inductor is not None:
        console.print(f"Inductor: {found.no_inductor}.", highlight=False)
    console.print(
        "\nWhere to look next\n"
        "  torch_mlc.explain(model, *inputs)   each kernel: source, schedule, bytes moved, what was not fused and why\n"
        "  MLC_DUMP_DIR=dumps …                the IR after every pass, as numbered files\n"
        "  MLC_TUNE=1 …                        measure the schedules that fit each kernel and keep the fastest\n"
        "  torch-mlc options                   every setting, and what it is here\n"
        "  torch-mlc docs architecture         how it works",
        highlight=False,
        markup=False,
    )


def steps_to_show(total: int) -> list[int]:
    """The first step, the last and a few between, counted from 1."""
    return sorted({max(1, round(total * part)) for part in (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)})


def _losses(found: Measured) -> Table:
    table = Table(title="Loss: equal weights, equal batches", title_justify="left")
    table.add_column("step", justify="right")
    for name in (*found.losses, "difference"):
        table.add_column(name, justify="right")
    eager, compiled = (found.losses[name] for name in ("eager", found.backend))
    for step in steps_to_show(len(eager)):
        a, b = eager[step - 1], compiled[step - 1]
        table.add_row(str(step), f"{a:.5f}", f"{b:.5f}", f"{b - a:+.1e}")
    table.add_section()
    a, b = found.held_out["eager"], found.held_out[found.backend]
    table.add_row("held-out text", f"{a:.5f}", f"{b:.5f}", f"{b - a:+.1e}")
    return table


def _speeds(found: Measured) -> Table:
    table = Table(
        title="Speed of a training step (forward, backward, AdamW)",
        caption=f"Median of {found.rounds} steps taken in turn. The first step compiles, with empty caches.",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("", "first step", "a step", "speed over eager's"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, seconds in found.step.items():
        first = f"{found.first_step[name]:.1f} s" if name in found.first_step else "–"
        table.add_row(name, first, f"{seconds * 1e3:.1f} ms", f"{found.step['eager'] / seconds:.2f}×")
    return table


def _compiled(found: Measured) -> Table:
    table = Table(title="The compiled forward and backward", title_justify="left")
    table.add_column("")
    table.add_column("count", justify="right")
    rows = {
        "graphs": "graphs_compiled",
        "graphs from the cache": "graph_cache_hits",
        "kernel launches a step": "kernel_calls",
        "different kernels generated": "kernels_generated",
        "different kernels from the cache": "kernel_cache_hits",
        "library calls a step": "library_calls",
        "kernels that fell back to ATen": "kernel_fallbacks",
    }
    for label, counter in rows.items():
        table.add_row(label, str(found.counts.get(counter, 0)))
    return table
