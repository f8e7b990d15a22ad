"""The commands of `torch-mlc`, each loaded only when it is asked for."""

from importlib import import_module

import click

from ... import __version__
from ...runtime.plain_text import write_out
from .near import CommandLine

# Command → module below dynamo_backend, and the one-line help that `--help` shows without loading it.
COMMANDS = {
    "demo": ("demo.command", "Train a small GPT through the backend, sample from it, compare with eager."),
    "info": ("cli.info", "Versions, targets, compilers found, the cache folder and what it holds."),
    "doctor": ("doctor.command", "Check this machine: does it compile, launch, agree with eager; how to mend it."),
    "conformance": ("conformance.command", "Check any backend of torch.compile against eager, in small programs."),
    "generate": (
        "generate.command",
        "Answer prompts by a language model from a folder, or by a small one trained first.",
    ),
    "export": ("cli.export", "Write a program of torch.export as a library that runs without Python and torch."),
    "cache": ("cli.cache", "List or clear the disk cache."),
    "tune": ("cli.tune", "What tuning has measured: show, list, share, verify, clear; train the cost model."),
    "lock": ("cli.lock", "Lock files, what was decided for a model: show one, compare two."),
    "docs": ("cli.docs", "The pages about torch-mlc: list them, print one."),
    "options": ("cli.options", "Every setting, its value here and where that comes from."),
}


class LazyGroup(CommandLine):
    """A group whose commands are imported on use, so that `info` does not pay for the demo."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"torch_mlc.dynamo_backend.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torch-mlc")
def cli() -> None:
    """torch-mlc: a compiler backend for torch.compile(model, backend="mlc")."""


def main(name: str = "torch-mlc") -> None:
    """Entry point of `torch-mlc`, and of `python -m torch_mlc` under that ``name``."""
    write_out()
    cli(prog_name=name)
