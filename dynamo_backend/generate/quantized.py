"""Products of a model by integers, as ``torch_mlc.quantize_`` makes them."""

from __future__ import annotations

import torch_mlc

from .errors import GenerateError
from .model import Decoder

WEIGHTS = ("int4", "int8")


def quantized(model: Decoder, weights: str | None) -> Decoder:
    """The model with weights of ``weights``, "int4" or "int8"; itself for None. Raises: GenerateError."""
    if weights is None:
        return model
    if weights not in WEIGHTS:
        raise GenerateError(f"quantize is {weights!r}; there are {', '.join(WEIGHTS)}")
    return torch_mlc.quantize_(model, weights=weights)
