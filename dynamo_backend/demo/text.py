"""The demo's text as numbers: one token a character, so that nothing has to be downloaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as int64 tokens [length]; the last tenth is held out of training."""

    alphabet: str
    training: Tensor
    held_out: Tensor

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[i] for i in tokens.tolist())


def load_corpus() -> Corpus:
    """Shakespeare's plays as shipped in data/ (see data/ORIGIN.md)."""
    text = (resources.files(__package__) / "data" / "shakespeare.txt").read_text(encoding="ascii")
    alphabet = "".join(sorted(set(text)))
    code = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([code[character] for character in text])
    cut = len(tokens) * 9 // 10
    return Corpus(alphabet, tokens[:cut], tokens[cut:])


def batches(tokens: Tensor, batch: int, length: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows (inputs, targets), int64 [batch, length] each; equal seeds give equal batches."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length - 1, (batch, 1), generator=generator)
        windows = tokens[starts + offsets].to(device)
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
