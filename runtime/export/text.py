"""Texts by a language model that was written as a library: NumPy, the library, and no torch.

This file works standing alone beside ``open.py``, as an export of a language model leaves both in its folder::

    python folder/text.py --prompt "The sea"
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING or __package__:
    from .open import ModelLibrary
else:
    from open import ModelLibrary


class TextLibrary:
    """A language model in a folder. Each object answers one prompt at a time, taking the likeliest tokens.

    ``threads`` is as for ``ModelLibrary``. Raises: LibraryError as that does; FileNotFoundError where the folder holds
    no language model; ImportError where texts need the library tokenizers and it is missing.
    """

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        folder = Path(folder)
        told = json.loads((folder / "text.json").read_text(encoding="utf-8"))
        self.length, self.chunk, self.vocabulary = told["length"], told["chunk"], told["vocabulary"]
        self.stop = frozenset(told["stop"])
        self.alphabet: str | None = told.get("alphabet")
        self._tokenizer: Any = None
        if self.alphabet is None:
            tokenizers: Any = importlib.import_module("tokenizers")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._context = ModelLibrary(folder, threads).context()

    def encode(self, text: str) -> list[int]:
        """Raises: ValueError for characters that the model does not know."""
        if self.alphabet is None:
            return list(self._tokenizer.encode(text).ids)
        odd = sorted(set(text) - set(self.alphabet))
        if odd:
            raise ValueError(f"the model knows no {', '.join(map(repr, odd))}")
        return [self.alphabet.index(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        if self.alphabet is None:
            return str(self._tokenizer.decode(list(tokens)))
        return "".join(self.alphabet[t] for t in tokens)

    def tokens(self, prompt: Sequence[int], max_new_tokens: int = 128) -> Iterator[int]:
        """The tokens after those of a prompt, as they come; one that ends the answer is the last.

        Raises: ValueError for prompts that are empty, too long, or hold tokens that the model does not know.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it is 1 or more")
        if not prompt or not all(0 <= t < self.vocabulary for t in prompt):
            raise ValueError(f"a prompt is one token or more, each from 0 to {self.vocabulary - 1}")
        if len(prompt) + max_new_tokens > self.length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with {max_new_tokens} new ones that is more than the "
                f"{self.length} of the cache"
            )
        return self._answer(list(prompt), max_new_tokens)

    def _answer(self, prompt: list[int], count: int) -> Iterator[int]:
        token = 0
        for first in range(0, len(prompt), self.chunk):
            part = prompt[first : first + self.chunk]
            token = self._step("prompt", part + [0] * (self.chunk - len(part)), first, len(part) - 1)
        for position in range(len(prompt), len(prompt) + count):
            yield token
            if token in self.stop or position + 1 == len(prompt) + count:
                return
            token = self._step("decode", [token], position, 0)

    def _step(self, name: str, tokens: list[int], first: int, last: int) -> int:
        positions = np.arange(first, first + len(tokens), dtype=np.int64)[None]
        given = np.array([tokens], np.int64), positions, np.array([last], np.int64)
        return int(self._context.call(name, *given)[0][0])

    def text(self, prompt: str, max_new_tokens: int = 128) -> str:
        """The whole answer to a prompt."""
        answer = list(self.tokens(self.encode(prompt), max_new_tokens))
        return self.decode(answer[:-1] if answer[-1] in self.stop else answer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a prompt by the language model in this folder.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    given = parser.parse_args()
    try:
        answer = TextLibrary(given.folder, given.threads).text(given.prompt, given.max_new_tokens)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(f"{given.prompt}{answer}\n")


if __name__ == "__main__":
    main()
