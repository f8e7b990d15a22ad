"""Language models as libraries: the tokens of ``generate``, by a process without torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import torch_mlc
from torch_mlc import Generator
from torch_mlc.dynamo_backend.generate import command
from torch_mlc.dynamo_backend.generate.errors import GenerateError
from torch_mlc.dynamo_backend.generate.model import Decoder
from torch_mlc.dynamo_backend.generate.tokens import Characters, TokenizerFile
from torch_mlc.runtime.export.text import TextLibrary

PROMPTS = ["to be", "x", "the quality of mercy is not strained"]


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_tokens_are_those_of_generate(
    decoder: Decoder, characters: Characters, tmp_path: Path, weights: str | None
) -> None:
    model = copy.deepcopy(decoder)
    if weights:
        torch_mlc.quantize_(model, weights=weights, group=16)
    stop = [characters.encode("e")[0]]
    generator = Generator(model, characters, length=64, chunk=8, stop=stop)
    library = TextLibrary(generator.export(tmp_path / "model"), threads=1)
    for prompt in (*PROMPTS, PROMPTS[0]):
        given = characters.encode(prompt)
        wanted = [p.token for p in generator.generate([given], max_new_tokens=20)]
        assert list(library.tokens(given, 20)) == wanted
    assert library.text(PROMPTS[2], 20) == generator.texts([PROMPTS[2]], max_new_tokens=20)[0]
    if weights:
        return
    for wrong, says in (([], "one token"), ([99], "one token"), ([1] * 60, "more than the 64")):
        with pytest.raises(ValueError, match=says):
            library.tokens(wrong, 20)
    with pytest.raises(ValueError, match="knows no"):
        library.encode("[")
    # Torch and this project cannot be imported there.
    run = "import sys, runpy; sys.modules['torch'] = sys.modules['torch_mlc'] = None; sys.argv = sys.argv[1:]; "
    run += "sys.path.insert(0, sys.argv[1]); del sys.argv[1]; runpy.run_path(sys.argv[0], run_name='__main__')"
    folder = tmp_path / "model"
    args = [str(folder / "text.py"), str(folder), "--prompt", PROMPTS[0], "--max-new-tokens", "9"]
    done = subprocess.run([sys.executable, "-c", run, *args], capture_output=True, text=True, check=True)
    assert done.stdout == PROMPTS[0] + generator.texts([PROMPTS[0]], max_new_tokens=9)[0] + "\n"


def test_a_tokenizer_of_a_file_is_written_beside_the_library(decoder: Decoder, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "to": 1, "be": 2, "or": 3, "not": 4, **{f"w{k}": k for k in range(5, 27)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    generator = Generator(decoder, TokenizerFile(made), length=24, chunk=4)
    library = TextLibrary(generator.export(tmp_path), threads=1)
    assert library.encode("to be or") == [1, 2, 3]
    assert library.text("to be or", 6) == generator.texts(["to be or"], max_new_tokens=6)[0]


def test_what_cannot_be_exported_is_told(decoder: Decoder, characters: Characters, tmp_path: Path) -> None:
    with pytest.raises(GenerateError, match="knows no GPUs"):
        Generator(decoder, characters, length=16).export(tmp_path, targets=("cuda:sm_90",))
    of_answers = (
        "--prompt a", "--temperature 1", "--cache paged", "--cache static", "--batch 2", "--top-k 3", "--top-p .5",
        "--max-new-tokens 4", "--stats", "--json",
    )  # fmt: skip
    for text in of_answers:
        args = text.split()
        result = CliRunner().invoke(command.generate, ["--export", str(tmp_path), *args])
        assert result.exit_code == 2 and "static cache" in result.output and f"{args[0]} out" in result.output


def test_the_command_writes_a_library(tmp_path: Path) -> None:
    args = ["--train-steps", "1", "--backend", "eager", "--length", "32", "--chunk", "8", "--export", str(tmp_path)]
    result = CliRunner().invoke(command.generate, args, catch_exceptions=False)
    assert result.exit_code == 0 and "text.py" in result.output
    assert len(TextLibrary(tmp_path, threads=1).text("ROMEO:", 5)) == 5
