"""What weights and activations of few bits cost a trained model: the demo's GPT, trained on the spot.

    python -m benchmarks.quantized.accuracy --steps 600

Held-out text: how often the most likely character is the same as in float32, and how much the perplexity grows.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_mlc
from torch_mlc.dynamo_backend.demo.model import GPT
from torch_mlc.dynamo_backend.demo.text import Corpus, batches, load_corpus
from torch_mlc.dynamo_backend.demo.train import new_trainer, training_batches

FORMS = (("int8", None), ("int8", "int8"), ("int4", None), ("int4", "int8"))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a rounded model beside the one that it was: the share of places with the same most likely character, and how
    many times as large its perplexity is."""

    top1: float
    perplexity: float


def trained(steps: int, seed: int = 0) -> tuple[GPT, Corpus]:
    """The demo's model after so many steps of training in eager mode."""
    corpus = load_corpus()
    trainer = new_trainer(None, corpus, "cpu", steps, seed)
    for tokens, targets in islice(training_batches(corpus, "cpu", seed), steps):
        trainer.step(tokens, targets)
    return trainer.model.eval(), corpus


def windows_of(model: GPT, corpus: Corpus, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return islice(batches(corpus.held_out, 48, model.shape.context, 0, "cpu"), count)


@torch.no_grad()
def agreement(model: GPT, rounded: GPT, corpus: Corpus, count: int = 8, backend: str | None = None) -> Agreement:
    """Over ``count`` batches of held-out windows, ``rounded`` in eager mode or compiled."""
    hidden = rounded.hidden if backend is None else torch.compile(rounded.hidden, backend=backend)
    same = total = 0
    losses = [0.0, 0.0]
    for tokens, targets in windows_of(model, corpus, count):
        found, wanted = (F.linear(h(tokens), model.tokens.weight) for h in (hidden, model.hidden))
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        total += targets.numel()
        for k, values in enumerate((found, wanted)):
            losses[k] += F.cross_entropy(values.flatten(0, 1), targets.flatten()).item() / count
    return Agreement(same / total, math.exp(losses[0] - losses[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--backend", default=None, help="of the rounded models; eager mode by default")
    asked = parser.parse_args()
    model, corpus = trained(asked.steps)
    print("| weights | activations | top-1 | perplexity |\n|---|---|---|---|")
    for weights, activations in FORMS:
        rounded = torch_mlc.quantize_(copy.deepcopy(model), weights, asked.group, activations)
        found = agreement(model, rounded, corpus, backend=asked.backend)
        print(f"| {weights} | {activations or 'float32'} | {found.top1:.2%} | {found.perplexity - 1:+.2%} |")


if __name__ == "__main__":
    main()
