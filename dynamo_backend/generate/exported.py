"""A language model as a library: its two graphs as functions over one cache, what tells texts, and a program to run it.

The cache is state of the library, so that every context answers one prompt at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...runtime.export import open as opening
from ...runtime.export import text as running
from ..export.export import export
from .caches import Room, StaticRows
from .errors import GenerateError
from .model import Decoder
from .tokens import Characters, Tokenizer, TokenizerFile


class CachedStep(nn.Module):
    """``forward(tokens, positions, last)``, int64 [1, length], [1, length] and [1], gives the likeliest token after
    that at the place ``last``, int64 [1]; the cache is buffers."""

    def __init__(self, model: Decoder, cache: StaticRows) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        for k, tensor in enumerate(cache.tensors):
            self.register_buffer(f"cache_{k}", tensor, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        tensors = [getattr(self, f"cache_{k}") for k in range(len(self.cache.tensors))]
        states = self.model(tokens, positions, self.cache.attend(tensors, positions))
        rows = torch.arange(states.shape[0], device=states.device)
        return self.model.logits(states[rows, last] if states.shape[1] > 1 else states[:, 0]).argmax(-1)


def export_decoder(
    model: Decoder, tokenizer: Tokenizer, room: Room, stop: Iterable[int], folder: str | Path, targets: Sequence[str]
) -> Path:
    """Write a model as a library with the functions ``prompt`` and ``decode``; returns the folder.

    Raises: GenerateError for targets that are GPUs and for tokenizers that cannot be written; ExportError for what a
    library cannot do.
    """
    if any(t.startswith("cuda") for t in targets):
        raise GenerateError("a language model is exported for processors; the program that runs it knows no GPUs")
    if not isinstance(tokenizer, Characters | TokenizerFile):
        raise GenerateError(f"a tokenizer of the type {type(tokenizer).__name__} cannot be written into a folder")
    cache = StaticRows(model.config, Room(1, room.length, room.chunk), model.embed_tokens.weight.dtype)
    step = CachedStep(model, cache).eval()
    programs = {}
    for name, count in (("prompt", room.chunk), ("decode", 1)):
        given = torch.zeros((1, count), dtype=torch.int64), torch.arange(count)[None], torch.tensor([count - 1])
        with torch.no_grad():
            programs[name] = torch.export.export(step, given)
    path = export(programs, folder, targets=targets)
    told = {"length": room.length, "chunk": room.chunk, "vocabulary": model.config.vocabulary, "stop": sorted(stop)}
    if isinstance(tokenizer, Characters):
        told["alphabet"] = tokenizer.alphabet
    else:
        (path / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(), encoding="utf-8")
    (path / "text.json").write_text(json.dumps(told), encoding="utf-8")
    for module in (opening, running):
        shutil.copyfile(str(module.__file__), path / Path(str(module.__file__)).name)
    return path
