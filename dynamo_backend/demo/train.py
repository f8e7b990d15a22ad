"""Training, timing and sampling: the same few lines for eager PyTorch and for every backend of torch.compile."""

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .model import GPT, ModelShape
from .text import Corpus, batches

BATCH = 12
PEAK_RATE = 3e-3


@dataclass(slots=True)
class Trainer:
    """One model with its optimizer. `backend` None is eager; otherwise a name that torch.compile knows."""

    backend: str | None
    model: GPT
    device: str
    total_steps: int
    losses: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    _loss: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    _optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self._loss = self.model if self.backend is None else torch.compile(self.model, backend=self.backend)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.1)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step; returns the seconds it took. The first one compiles."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        loss = self._loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        seconds = time.perf_counter() - started
        self.first_step_seconds = self.first_step_seconds or seconds
        return seconds

    def _rate(self) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
        done, warm = len(self.losses), max(1, self.total_steps // 10)
        if done < warm:
            return PEAK_RATE * (done + 1) / warm
        along = min(1.0, (done - warm) / max(1, self.total_steps - warm))
        return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * along))


def new_trainer(backend: str | None, corpus: Corpus, device: str, steps: int, seed: int) -> Trainer:
    """A trainer with fresh weights; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return Trainer(backend, GPT(ModelShape(len(corpus.alphabet))).to(device), device, steps)


def training_batches(corpus: Corpus, device: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return batches(corpus.training, BATCH, ModelShape(1).context, seed, device)


@torch.no_grad()
def held_out_loss(trainer: Trainer, corpus: Corpus) -> float:
    """Mean loss over windows of the text that training did not see, computed by eager PyTorch."""
    windows = batches(corpus.held_out, 4 * BATCH, trainer.model.shape.context, 0, trainer.device)
    return statistics.fmean(trainer.model(*next(windows)).item() for _ in range(4))


def interleaved_step_seconds(
    trainers: Mapping[str, Trainer], data: Iterator[tuple[Tensor, Tensor]], rounds: int
) -> dict[str, float]:
    """Median seconds of a step for each trainer. Each round runs one step of every trainer on the same batch, so that
    what else the machine does falls on all alike; the first two rounds only warm up."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for round_ in range(rounds + 2):
        batch = next(data)
        for name, trainer in trainers.items():
            seconds = trainer.step(*batch)
            if round_ >= 2:
                times[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in times.items()}


@torch.no_grad()
def sample(trainer: Trainer, corpus: Corpus, length: int, seed: int, temperature: float = 0.8) -> tuple[str, str]:
    """Continue a passage that training did not see, by `length` characters: (the passage's end, what was written).

    The window keeps one length throughout, so that one compiled graph serves every character.
    """
    model = trainer.model
    logits_of = model.next_logits
    if trainer.backend is not None:
        logits_of = torch.compile(model.next_logits, backend=trainer.backend)
    window = corpus.held_out[: model.shape.context].to(trainer.device).unsqueeze(0)
    prompt = corpus.decode(window[0])
    generator = torch.Generator().manual_seed(seed)
    written = []
    for _ in range(length):
        odds = torch.softmax(logits_of(window).float().cpu() / temperature, dim=-1)
        token = torch.multinomial(odds, 1, generator=generator)
        written.append(token.item())
        window = torch.cat([window[:, 1:], token.to(trainer.device)], dim=1)
    return prompt, corpus.decode(torch.tensor(written))


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would find, or None."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := shutil.which(name))),
        None,
    )
