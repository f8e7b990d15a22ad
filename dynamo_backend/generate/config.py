"""The shape of a decoder, read from the ``config.json`` of a folder as Hugging Face writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import GenerateError

# What an architecture has beside the plain form of Llama: biases of queries, keys and values; norms of heads.
_FAMILIES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"head_norm": True},
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder of the Llama family. ``window`` is how many positions back a token sees, None for all;
    ``rope_scaling`` the entry of that name in ``config.json``."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    context: int = 2048
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    window: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    head_norm: bool = False
    stop: tuple[int, ...] = ()
    dtype: str = "float32"

    def frequencies(self) -> list[float]:
        """The angle by which each pair of features turns from one position to the next, in radians."""
        half = self.head_width // 2
        plain = [self.rope_theta ** (-k / half) for k in range(half)]
        scaling = self.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        factor = float(scaling.get("factor", 1.0))
        if kind == "default":
            return plain
        if kind == "linear":
            return [f / factor for f in plain]
        if kind == "llama3":
            return [_llama3(f, factor, scaling) for f in plain]
        raise GenerateError(
            f"rope_scaling of the type {kind!r} is not known; there are default, linear and llama3. "
            "Take it out of config.json to generate without it, for texts that are no longer than the model was "
            "trained for"
        )


def _llama3(frequency: float, factor: float, scaling: Mapping[str, Any]) -> float:
    """Long waves are stretched, short ones are not, and those between by their share (Llama 3.1's model card)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    old = float(scaling["original_max_position_embeddings"])
    turns = old * frequency / (2 * math.pi)
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (share + (1 - share) / factor)


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of a folder. Raises: GenerateError where there is none, or it is of another family."""
    if not folder.is_dir():
        hint = "; download it first, as huggingface-cli download does" if str(folder).count("/") == 1 else ""
        raise GenerateError(f"there is no folder {str(folder)!r}{hint}")
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise GenerateError(
            f"{folder} has no config.json; it holds {found}. A model's folder holds config.json, *.safetensors and "
            "tokenizer.json"
        )
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise GenerateError(f"{file} is no JSON: {error}") from error
    return _parsed(given, file, _stop_tokens(folder, given))


def _parsed(given: Mapping[str, Any], file: Path, stop: tuple[int, ...]) -> DecoderConfig:
    named = given.get("architectures") or ["none"]
    family = _FAMILIES.get(named[0])
    if family is None:
        raise GenerateError(
            f"{file} describes the architecture {named[0]}; generate has {', '.join(_FAMILIES)}. Other models run by "
            'transformers\' own generate with CompileConfig(backend="mlc"), see docs/generate.md'
        )
    activation = given.get("hidden_act", "silu")
    if activation != "silu":
        raise GenerateError(f"{file}: hidden_act is {activation!r}; models of this family have 'silu'")
    try:
        heads, width = int(given["num_attention_heads"]), int(given["hidden_size"])
        rope = given.get("rope_scaling") or given.get("rope_parameters")
        window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
        config = DecoderConfig(
            vocabulary=int(given["vocab_size"]), width=width, layers=int(given["num_hidden_layers"]), heads=heads,
            kv_heads=int(given.get("num_key_value_heads") or heads),
            head_width=int(given.get("head_dim") or width // heads), hidden=int(given["intermediate_size"]),
            context=int(given.get("max_position_embeddings", 2048)),
            norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope_theta=float(given.get("rope_theta") or (rope or {}).get("rope_theta", 10000.0)),
            rope_scaling=rope, window=int(window) if window else None,
            tied=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=bool(given.get("attention_bias", family.get("qkv_bias", False))),
            head_norm=family.get("head_norm", False), stop=stop,
            dtype=str(given.get("torch_dtype") or given.get("dtype") or "float32"),
        )  # fmt: skip
    except KeyError as missing:
        raise GenerateError(f"{file} has no {missing.args[0]}") from missing
    except (TypeError, ValueError) as error:
        raise GenerateError(f"{file} has a value that is no number where one belongs: {error}") from error
    if config.heads % config.kv_heads or config.head_width % 2:
        raise GenerateError(
            f"{file}: {config.heads} heads cannot share {config.kv_heads} heads of keys, or the head's width "
            f"{config.head_width} is odd"
        )
    return config


def _stop_tokens(folder: Path, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: those of ``generation_config.json`` where there is one."""
    file = folder / "generation_config.json"
    own = json.loads(file.read_text()) if file.is_file() else {}
    found = own.get("eos_token_id", given.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(int(t) for t in found) if isinstance(found, list) else (int(found),)
