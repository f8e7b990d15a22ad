"""`python -m torch_mlc demo`."""

import click
import torch
from rich.console import Console

from .run import Training, run


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Training steps.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights, batches and sampling.")
@click.option("--inductor/--no-inductor", default=True, help="Time Inductor too, where there is a C++ compiler.")
@click.option("--backend", default="mlc", hidden=True, help="The torch.compile backend to show in place of mlc.")
def demo(steps: int, device: str, seed: int, inductor: bool, backend: str) -> None:
    """Train a small GPT on Shakespeare through backend="mlc", sample from it, compare with eager."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("this torch sees no GPU; leave --device out to run on the CPU", param_hint="--device")
    run(Training(steps, device, seed, inductor, backend), Console())
