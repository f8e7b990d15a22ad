"""A small decoder with weights that were never trained, and its folder as Hugging Face would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.generate.config import DecoderConfig
from torch_mlc.dynamo_backend.generate.model import Decoder
from torch_mlc.dynamo_backend.generate.tokens import Characters

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"
CONFIG = DecoderConfig(
    vocabulary=len(ALPHABET), width=32, layers=2, heads=4, kv_heads=2, head_width=8, hidden=48, context=256
)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval().requires_grad_(False)
    # Logits of larger weights differ by more than rounding does.
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture(scope="session")
def characters() -> Characters:
    return Characters(ALPHABET)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """The format as its specification has it: a length, a header, data."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def hub_tensors(model: Decoder) -> dict[str, Tensor]:
    """A decoder's weights under the names of Hugging Face."""
    config = model.config
    rows = [n * config.head_width for n in (config.heads, config.kv_heads, config.kv_heads)]
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not config.tied:
                found[name] = tensor
        elif "qkv_proj" in name:
            for x, part in zip("qkv", tensor.split(rows), strict=True):
                found["model." + name.replace("qkv_proj", f"{x}_proj")] = part
        else:
            found["model." + name] = tensor
    return found


def hub_config(config: DecoderConfig, **others: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": config.vocabulary, "hidden_size": config.width,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "intermediate_size": config.hidden, "hidden_act": "silu",
        "max_position_embeddings": config.context, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied, "torch_dtype": "float32", "eos_token_id": None, **others,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, decoder: Decoder) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(hub_config(decoder.config)))
    write_safetensors(tmp_path / "model.safetensors", hub_tensors(decoder))
    return tmp_path
