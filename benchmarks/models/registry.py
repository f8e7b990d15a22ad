"""Every benchmark model by name, in the order in which tables show them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from . import bert, dlrm, gpt, gpt_decode, llama, llama_decode, lstm, mixer, mobilenet, resnet, unet, vit
from .spec import ModelSpec

_FILES = (gpt, gpt_decode, llama, llama_decode, bert, resnet, mobilenet, vit, mixer, dlrm, unet, lstm)
MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for file in _FILES for spec in file.SPECS})


def get_model(name: str) -> ModelSpec:
    """The model called ``name``. Raises: ValueError naming the nearest one."""
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no model called {name!r}{hint} The models are {', '.join(MODELS)}.")
