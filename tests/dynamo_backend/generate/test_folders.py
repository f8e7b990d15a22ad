"""Folders as Hugging Face writes them: what is read, and what is said of what cannot be."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_mlc import Generator
from torch_mlc.dynamo_backend.generate.config import read_config
from torch_mlc.dynamo_backend.generate.errors import GenerateError
from torch_mlc.dynamo_backend.generate.model import Decoder, causal
from torch_mlc.dynamo_backend.generate.tokens import TextStream, load_tokenizer
from torch_mlc.dynamo_backend.generate.weights import load_decoder

from .conftest import CONFIG, hub_config, hub_tensors, write_safetensors


def change(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def states(model: Decoder) -> torch.Tensor:
    tokens = torch.arange(7)[None]
    return model.logits(model(tokens, tokens, causal))


def test_weights_come_back(folder: Path, decoder: Decoder) -> None:
    model = load_decoder(folder, read_config(folder), torch.float32)
    assert model.config == decoder.config
    torch.testing.assert_close(states(model), states(decoder), rtol=0, atol=0)


def test_weights_in_several_files_and_of_another_type(folder: Path, decoder: Decoder) -> None:
    tensors = {k: v.bfloat16() for k, v in hub_tensors(decoder).items()}
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for k, part in enumerate((names[::2], names[1::2])):
        write_safetensors(folder / f"model-{k}.safetensors", {n: tensors[n] for n in part})
    model = load_decoder(folder, read_config(folder), torch.float32)
    torch.testing.assert_close(model.norm.weight, decoder.norm.weight.bfloat16().float(), rtol=0, atol=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "more",
    [
        {"qkv_bias": True, "architectures": ["Qwen2ForCausalLM"]},
        {"head_norm": True, "architectures": ["Qwen3ForCausalLM"]},
        {"tied": True},
    ],
    ids=["qwen2", "qwen3", "tied"],
)
def test_families(tmp_path: Path, more: dict[str, object]) -> None:
    ours = {k: v for k, v in more.items() if k != "architectures"}
    config = replace(CONFIG, **ours)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = Decoder(config).eval().requires_grad_(False)
    others = {k: v for k, v in more.items() if k == "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(hub_config(config, **others)))
    write_safetensors(tmp_path / "model.safetensors", hub_tensors(model))
    read = load_decoder(tmp_path, read_config(tmp_path), torch.float32)
    assert read.config == config
    torch.testing.assert_close(states(read), states(model), rtol=0, atol=0)


def test_a_window(folder: Path) -> None:
    change(folder, architectures=["MistralForCausalLM"], sliding_window=5)
    assert read_config(folder).window == 5
    change(folder, use_sliding_window=False)
    assert read_config(folder).window is None


def test_rotations_that_are_scaled(folder: Path) -> None:
    plain = read_config(folder).frequencies()
    change(folder, rope_scaling={"type": "linear", "factor": 4.0})
    assert read_config(folder).frequencies() == [f / 4 for f in plain]
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100,
    }  # fmt: skip
    change(folder, rope_scaling=scaling)
    for before, after in zip(plain, read_config(folder).frequencies(), strict=True):
        wave = 2 * math.pi / before
        if wave < 100 / 4.0:
            assert after == before
        elif wave > 100 / 1.0:
            assert after == pytest.approx(before / 8)
        else:
            assert before / 8 < after < before
    change(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(GenerateError, match="'yarn' is not known; there are default, linear and llama3"):
        read_config(folder).frequencies()


def test_stop_tokens_of_the_generation_config(folder: Path) -> None:
    change(folder, eos_token_id=4)
    assert read_config(folder).stop == (4,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(folder).stop == (5, 6)


def test_a_missing_tensor_and_a_wrong_shape(folder: Path, decoder: Decoder) -> None:
    tensors = hub_tensors(decoder)
    name = "model.layers.1.mlp.up_proj.weight"
    write_safetensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(GenerateError, match=rf"no tensor '{name}' of shape \[48, 32\].*download complete"):
        load_decoder(folder, read_config(folder), torch.float32)
    write_safetensors(folder / "model.safetensors", {**tensors, name: tensors[name][:40]})
    with pytest.raises(GenerateError, match=rf"'{name}' is \[40, 32\]; by config.json it would be \[48, 32\]"):
        load_decoder(folder, read_config(folder), torch.float32)


def test_files_that_are_damaged(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut in (b"", b"\x05", whole[:6], whole[:40], whole[: len(whole) - 300], b"\xff" * 100):
        file.write_bytes(cut)
        with pytest.raises(GenerateError, match=r"cut off|no file of safetensors"):
            load_decoder(folder, read_config(folder), torch.float32)


def test_what_is_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(GenerateError, match="there is no folder 'meta/llama'; download it first"):
        read_config(Path("meta/llama"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(GenerateError, match=r"has no config.json; it holds nothing"):
        read_config(empty)
    change(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(GenerateError, match=r"GPT2LMHeadModel; generate has LlamaForCausalLM, .*CompileConfig"):
        read_config(folder)
    change(folder, architectures=["LlamaForCausalLM"], num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(GenerateError, match="3 heads cannot share 2"):
        read_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(GenerateError, match="is no JSON"):
        read_config(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(GenerateError, match="has no num_attention_heads"):
        read_config(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(GenerateError, match=r"holds no \*.safetensors; model.bin would have to be saved"):
        load_decoder(folder, read_config(folder), torch.float32)


def test_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GenerateError, match=r"has no tokenizer.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GenerateError, match=r"pip install 'torch-mlc\[generate\]'"):
        load_tokenizer(folder)


def test_a_folder_with_a_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
    words = {w: k for k, w in enumerate(["[UNK]", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = Generator.from_folder(folder, length=32, backend="eager")
    assert len(list(generator.generate("to be or", max_new_tokens=4))) == 4


def test_wrong_types(folder: Path) -> None:
    with pytest.raises(GenerateError, match="dtype is 'int3'; there are float32, bfloat16, float16"):
        Generator.from_folder(folder, dtype="int3")


def test_characters_of_several_tokens_are_told_whole() -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = TextStream(Bytes())
    parts = [stream.add(t) for t in "aé€z".encode()]
    assert parts == ["a", "", "é", "", "", "€", "z"]
    assert stream.add(0xC3) == "" and stream.end() == "\ufffd"
