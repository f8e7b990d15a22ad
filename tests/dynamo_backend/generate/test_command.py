"""`torch-mlc generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import torch_mlc
from torch_mlc.dynamo_backend.generate import command
from torch_mlc.dynamo_backend.generate.generator import Generator
from torch_mlc.dynamo_backend.generate.model import Decoder
from torch_mlc.dynamo_backend.generate.tokens import Characters

FEW = ["--backend", "eager", "--train-steps", "2", "--max-new-tokens", "6"]


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(command.generate, args, catch_exceptions=False)
    return result.exit_code, result.output


def test_a_model_that_is_trained_on_the_spot() -> None:
    code, output = run(*FEW, "--prompt", "ROMEO", "--stats")
    assert code == 0 and "ROMEO" in output and "decode" in output and "memory   weights" in output


def test_json_of_several_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("First\nSecond\n")
    code, output = run(*FEW, "--prompt", "Zero", "--prompts", str(file), "--batch", "2", "--cache", "paged", "--json")
    told = json.loads(output.strip().splitlines()[-1])
    assert code == 0 and told["prompts"] == ["Zero", "First", "Second"]
    assert [len(a) for a in told["answers"]] == [6, 6, 6]
    assert told["decoded_tokens_per_second"] > 0 and told["peak_bytes"] > 0


def test_several_answers_are_written_one_after_the_other() -> None:
    code, output = run(*FEW, "--prompt", "One", "--prompt", "Two")
    assert code == 0 and output.count("--- ") == 2 and "--- 1 (length)\nTwo" in output


def test_a_folder(folder: Path, characters: Characters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_mlc.dynamo_backend.generate.generator.load_tokenizer", lambda folder: characters)
    args = [str(folder), "--backend", "eager", "--prompt", "to be", "--max-new-tokens", "5", "--length", "40", "--json"]
    code, output = run(*args)
    assert code == 0 and len(json.loads(output)["answers"][0]) == 5


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantized_products(
    folder: Path, characters: Characters, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """What ``torch_mlc.quantize_`` is asked for, and that its result is what runs."""
    asked: list[str] = []

    def quantize(model: Decoder, weights: str) -> Decoder:
        asked.append(weights)
        model.lm_head.weight.zero_()
        return model

    monkeypatch.setattr("torch_mlc.dynamo_backend.generate.generator.load_tokenizer", lambda folder: characters)
    monkeypatch.setattr(torch_mlc, "quantize_", quantize, raising=False)
    code, output = run(
        str(folder), "--backend", "eager", "--prompt", "to", "--max-new-tokens", "3", "--quantize", weights, "--json"
    )
    assert code == 0 and asked == [weights]
    # The likeliest of logits that are all zero is the first token.
    assert json.loads(output)["answers"] == [characters.decode([0, 0, 0])]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere/model"], "there is no folder 'nowhere/model'"),
        ([*FEW, "--prompt", "[]"], "the model knows no '[', ']'"),
        ([*FEW, "--length", "5", "--prompt", "abc"], "prompt 0 has 3 tokens; with 6 new ones"),
        ([*FEW, "--temperature", "-1"], "temperature is -1.0"),
        ([*FEW, "--stop", "ab"], "--stop 'ab' is 2 tokens"),
        ([*FEW, "--cache", "ring"], "'ring' is not one of"),
        ([*FEW, "--threads", "-2"], "-2 is no number of threads"),
    ],
)
def test_wrong_calls(args: list[str], says: str) -> None:
    code, output = run(*args)
    assert code != 0 and says in output


def test_the_command_is_listed() -> None:
    from torch_mlc.dynamo_backend.cli.main import cli

    assert "generate" in CliRunner().invoke(cli, ["--help"]).output
    assert torch_mlc.Generator is Generator
