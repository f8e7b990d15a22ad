"""`python -m torch_mlc generate`."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from rich.console import Console

from ..cli.near import tell
from ..export.errors import ExportError
from .errors import GenerateError
from .generator import DTYPES, GenerationStats, Generator
from .quantized import WEIGHTS, quantized
from .trained import train_decoder

EXAMPLE = "ROMEO:\n"
# Parameters that a model which is written has no use for.
_OF_ANSWERS = frozenset((
    "given", "file", "max_new_tokens", "temperature", "top_k", "top_p", "batch", "cache", "stats", "as_json",
))  # fmt: skip


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--prompt", "given", multiple=True, help="A prompt; may be given several times.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a prompt a line.",
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Draw among so many tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw among tokens of that probability.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling, and of training.")
@click.option("--batch", type=int, default=0, help="Prompts at work at once; by default all, up to 8.")
@click.option("--length", type=int, default=0, help="Tokens of a prompt with its answer that the cache holds.")
@click.option("--chunk", type=int, default=64, show_default=True, help="Tokens of a prompt that are entered at a time.")
@click.option("--cache", type=click.Choice(["static", "paged"]), default="static", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True)
@click.option("--quantize", type=click.Choice(WEIGHTS), help="Products of weights of that type.")
@click.option("--backend", type=click.Choice(["mlc", "eager", "inductor"]), default="mlc", show_default=True)
@click.option("--threads", type=int, default=0, help="Threads of a CPU; by default torch's number.")
@click.option("--stop", multiple=True, help="A text of one token that ends an answer, beside the model's own.")
@click.option("--train-steps", type=click.IntRange(min=1), default=300, show_default=True, help="Without MODEL.")
@click.option(
    "--export",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Answer nothing, but write a library that does, without torch, into this folder.",
)
@click.option("--stats", is_flag=True, help="Tell rates, times and memory at the end.")
@click.option("--json", "as_json", is_flag=True, help="Answers and figures as one line of JSON.")
def generate(
    model: Path | None, given: tuple[str, ...], file: Path | None, batch: int, length: int, chunk: int, cache: str,
    dtype: str, quantize: str | None, backend: str, threads: int, stop: tuple[str, ...], train_steps: int, seed: int,
    out: Path | None, stats: bool, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Answer prompts by a language model.

    MODEL is a folder as Hugging Face writes them (config.json, *.safetensors, tokenizer.json). Without one, a small
    model first learns Shakespeare, a token a character, which takes a minute or two.
    """
    if threads < 0:
        raise click.BadParameter(f"{threads} is no number of threads", param_hint="--threads")
    if out is not None and (refused := _only_for_answers()):
        raise click.UsageError(
            "--export writes a model with a static cache that takes the likeliest tokens, and answers nothing: leave "
            f"{', '.join(refused)} out"
        )
    if threads:
        torch.set_num_threads(threads)
    prompts = [*given, *(file.read_text().splitlines() if file else ())] or [EXAMPLE]
    settings: dict[str, Any] = {
        "batch": batch or min(len(prompts), 8), "length": length, "chunk": chunk, "cache": cache, "backend": backend,
    }  # fmt: skip
    try:
        generator = (
            _trained(train_steps, seed, dtype, quantize, settings)
            if model is None
            else Generator.from_folder(model, dtype=dtype, quantize=quantize, **settings)
        )
        generator.stop |= {_one_token(generator, text) for text in stop}
        if out is not None:
            tell(f"python {generator.export(out) / 'text.py'} --prompt …")
            return
        answers = _written(generator, prompts, not as_json, seed=seed, **sampling)
    except (GenerateError, ExportError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        tell(json.dumps({"prompts": prompts, "answers": answers, **_figures(generator.stats)}))
    elif stats:
        _tell_stats(generator.stats)


def _trained(steps: int, seed: int, dtype: str, quantize: str | None, settings: dict[str, Any]) -> Generator:
    console = Console(stderr=True)
    with console.status("A small model learns Shakespeare") as status:
        model, tokenizer = train_decoder(
            steps, seed, settings["backend"],
            lambda step, loss: status.update(f"A small model learns Shakespeare: {step} of {steps}, loss {loss:.3f}"),
        )  # fmt: skip
    model = model.to(DTYPES["float32" if dtype == "auto" else dtype])
    return Generator(quantized(model, quantize), tokenizer, **settings)


def _only_for_answers() -> list[str]:
    """The options that were given and say something of answers alone, as they are written."""
    context = click.get_current_context()
    return [
        next(o for o in option.opts if o.startswith("--"))
        for option in context.command.params
        if option.name in _OF_ANSWERS and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]


def _one_token(generator: Generator, text: str) -> int:
    tokens = generator.tokenizer.encode(text)
    if len(tokens) != 1:
        raise GenerateError(f"--stop {text!r} is {len(tokens)} tokens; it has to be one")
    return tokens[0]


def _written(generator: Generator, prompts: list[str], aloud: bool, **settings: Any) -> list[str]:
    """The answers. One is written as it comes; several when each is whole, so that they do not mix."""
    answers = [""] * len(prompts)
    single = len(prompts) == 1
    pieces = generator.generate(prompts, **settings)
    if aloud and single:
        click.echo(prompts[0], nl=False)
    for piece in pieces:
        answers[piece.prompt] += piece.text
        if aloud and single:
            click.echo(piece.text, nl=False)
            sys.stdout.flush()
        elif aloud and piece.finished:
            click.echo(f"--- {piece.prompt} ({piece.finished})\n{prompts[piece.prompt]}{answers[piece.prompt]}")
    if aloud and single:
        click.echo()
    return answers


def _figures(stats: GenerationStats) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    return {
        **asdict(stats), "prompt_tokens_per_second": stats.prompt_rate,
        "decoded_tokens_per_second": stats.decode_rate, "peak_bytes": peak,
    }  # fmt: skip


def _tell_stats(stats: GenerationStats) -> None:
    figures = _figures(stats)
    first = stats.first_token_seconds
    for line in (
        f"prompt   {stats.prompt_rate:8.1f} tokens/s  ({stats.prompt_tokens} tokens)",
        f"decode   {stats.decode_rate:8.1f} tokens/s  ({stats.decoded_tokens} tokens)",
        f"first token after {min(first) * 1e3:.0f} to {max(first) * 1e3:.0f} ms",
        f"compiling took {stats.compile_seconds:.1f} s beside that",
        f"memory   weights {stats.weight_bytes / 1e6:.1f} MB, cache {stats.cache_bytes / 1e6:.1f} MB, process at most "
        f"{figures['peak_bytes'] / 1e6:.0f} MB",
    ):
        click.echo(line, err=True)
