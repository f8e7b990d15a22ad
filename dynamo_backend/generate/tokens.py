"""Texts as tokens: by a ``tokenizer.json`` and the library ``tokenizers``, or one token a character."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .errors import GenerateError


class Tokenizer(Protocol):
    """What the generator asks of a tokenizer; one of ``tokenizers`` or transformers wrapped so does as well."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Characters:
    """One token a character of ``alphabet``."""

    alphabet: str

    def encode(self, text: str) -> list[int]:
        """Raises: GenerateError for a character that is not in the alphabet."""
        known = {c: k for k, c in enumerate(self.alphabet)}
        odd = sorted({c for c in text if c not in known})
        if odd:
            raise GenerateError(
                f"the model knows no {', '.join(map(repr, odd))}; its characters are {self.alphabet.strip()!r}, space "
                "and new line"
            )
        return [known[c] for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[t] for t in tokens)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A ``tokenizer.json``."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def load_tokenizer(folder: Path) -> TokenizerFile:
    """The tokenizer of a folder. Raises: GenerateError where it or the library is missing."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise GenerateError(
            f"{folder} has no tokenizer.json; a tokenizer.model of sentencepiece has to be converted, as transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) does"
        )
    if importlib.util.find_spec("tokenizers") is None:
        raise GenerateError("tokenizer.json needs the library tokenizers: pip install 'torch-mlc[generate]'")
    try:
        return TokenizerFile(importlib.import_module("tokenizers").Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises plain exceptions
        raise GenerateError(f"{file} cannot be read: {error}") from error


@dataclass(slots=True)
class TextStream:
    """The text of one answer as its tokens come: a character of several tokens is told when it is whole."""

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    _begin: int = 0
    _told: int = 0

    def add(self, token: int) -> str:
        """The text that this token adds; "" where it waits for another."""
        self.tokens.append(token)
        before = self.tokenizer.decode(self.tokens[self._begin : self._told])
        now = self.tokenizer.decode(self.tokens[self._begin :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._begin, self._told = self._told, len(self.tokens)
        return now[len(before) :]

    def end(self) -> str:
        """What was still waiting."""
        before = self.tokenizer.decode(self.tokens[self._begin : self._told])
        return self.tokenizer.decode(self.tokens[self._begin :])[len(before) :]
