"""The demo from start to end: train eager and compiled, compare, sample, and say where to look next."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...runtime.counters import counters
from .report import Measured, show_comparison, show_sample
from .text import Corpus, load_corpus
from .train import (
    Trainer,
    cpp_compiler,
    held_out_loss,
    interleaved_step_seconds,
    new_trainer,
    sample,
    training_batches,
)

TIMED_ROUNDS = 15
SAMPLE_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Training:
    """What the command line asked for. `backend` is the name given to torch.compile in place of "mlc"."""

    steps: int
    device: str
    seed: int
    inductor: bool
    backend: str = "mlc"


@contextmanager
def empty_caches() -> Iterator[None]:
    """Folders without entries for the caches of torch-mlc and of torch, so that all first steps compile."""
    names = ("TORCH_MLC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with TemporaryDirectory(prefix="torch-mlc-demo-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name.lower()) for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def run(plan: Training, console: Console) -> None:
    """Run the demo; prints to `console`. Errors of the backend go to the caller as they are."""
    with empty_caches():
        _run(plan, console)


def _run(plan: Training, console: Console) -> None:
    corpus = load_corpus()
    before = counters.snapshot()
    compiled = new_trainer(plan.backend, corpus, plan.device, plan.steps, plan.seed)
    eager = new_trainer(None, corpus, plan.device, plan.steps, plan.seed)
    parameters = sum(parameter.numel() for parameter in compiled.model.parameters())
    console.print(
        f"A GPT of {parameters / 1e6:.2f} M parameters learns {len(corpus.training):,} characters of Shakespeare "
        f'on {plan.device}, through torch.compile(model, backend="{plan.backend}").',
        highlight=False,
    )
    counts: dict[str, int] = {}
    with _progress(console) as progress:
        for name, trainer in ((plan.backend, compiled), ("eager", eager)):
            task = progress.add_task(name, total=plan.steps, loss="", rate="compiling" if trainer is compiled else "")
            _train(trainer, corpus, plan, progress, task)
            counts = counts or counters.since(before)
    prompt, written = sample(compiled, corpus, SAMPLE_LENGTH, plan.seed)
    show_sample(console, prompt, written)

    held_out = {name: held_out_loss(trainer, corpus) for name, trainer in (("eager", eager), (plan.backend, compiled))}
    losses = {"eager": list(eager.losses), plan.backend: list(compiled.losses)}
    first = {plan.backend: compiled.first_step_seconds}
    trainers = {"eager": eager, plan.backend: compiled}
    why_not = _add_inductor(trainers, first, corpus, plan, console)
    with console.status("Timing one step of each in turn"):
        steps = interleaved_step_seconds(trainers, training_batches(corpus, plan.device, plan.seed + 1), TIMED_ROUNDS)
    show_comparison(console, Measured(plan.backend, losses, held_out, first, steps, why_not, counts, TIMED_ROUNDS))


def _train(trainer: Trainer, corpus: Corpus, plan: Training, progress: Progress, task: TaskID) -> None:
    data = training_batches(corpus, plan.device, plan.seed)
    trainer.step(*next(data))
    started = time.perf_counter()
    for done in range(1, plan.steps + 1):
        rate = (done - 1) / (time.perf_counter() - started) if done > 1 else 0.0
        progress.update(
            task, completed=done, loss=f"loss {trainer.losses[-1]:.3f}", rate=f"{rate:.1f} steps/s" if rate else ""
        )
        if done < plan.steps:
            trainer.step(*next(data))


def _add_inductor(
    trainers: dict[str, Trainer], first: dict[str, float], corpus: Corpus, plan: Training, console: Console
) -> str | None:
    """Put Inductor beside the others, compiled; or say why it is not there."""
    if not plan.inductor:
        return "left out by --no-inductor"
    if cpp_compiler() is None:
        return "no C++ compiler found, and it needs one"
    with console.status("Inductor compiles the same model, for comparison"):
        trainer = new_trainer("inductor", corpus, plan.device, plan.steps, plan.seed)
        try:
            trainer.step(*next(training_batches(corpus, plan.device, plan.seed)))
        except Exception as error:  # a peer that fails is a line in the table, whatever it failed of
            return f"failed: {str(error).strip().splitlines()[0][:100]}" if str(error).strip() else "failed"
    trainers["inductor"], first["inductor"] = trainer, trainer.first_step_seconds
    return None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
    )
