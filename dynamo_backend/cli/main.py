"""The commands of `python -m torch_mlc`, each loaded only when it is asked for."""

from difflib import get_close_matches
from importlib import import_module

import click

from ... import __version__

# Command → module below dynamo_backend, and the one-line help that `--help` shows without loading it.
COMMANDS = {
    "demo": ("demo.command", "Train a small GPT through the backend, sample from it, compare with eager."),
    "info": ("cli.info", "Versions, targets, compilers found, the cache folder and its size."),
    "cache": ("cli.cache", "List or clear the disk cache."),
    "options": ("cli.options", "Every setting, its value here and where that comes from."),
}


class LazyGroup(click.Group):
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.4)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no command {args[0]!r}.{guess} There are: {', '.join(COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torch-mlc")
def cli() -> None:
    """torch-mlc: a compiler backend for torch.compile(model, backend="mlc")."""


def main() -> None:
    """Entry point of `python -m torch_mlc`."""
    cli(prog_name="python -m torch_mlc")
