"""Products of a model by integers, as ``torch_mlc.quantize_`` makes them."""

from __future__ import annotations

from importlib import import_module

from .errors import GenerateError
from .model import Decoder

WEIGHTS = ("int4", "int8")


def quantized(model: Decoder, weights: str | None) -> Decoder:
    """The model with weights of ``weights``, "int4" or "int8"; itself for None. Raises: GenerateError."""
    if weights is None:
        return model
    if weights not in WEIGHTS:
        raise GenerateError(f"quantize is {weights!r}; there are {', '.join(WEIGHTS)}")
    # The public face is loaded by name: it is above this room.
    public = import_module(__name__.partition(".")[0])
    if not hasattr(public, "quantize_"):
        raise GenerateError("this version of torch-mlc has no quantize_; leave quantize out")
    result = public.quantize_(model, weights=weights)
    assert isinstance(result, Decoder)
    return result
