"""What all commands share: groups that know what a misspelt command is meant to be, and how text is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import click

from ...runtime.settings.variables import edit_distance

# Words that are no commands, and where what they ask for is.
_ELSEWHERE = {
    "version": "--version tells the version.",
    "help": "--help tells the commands.",
    "explain": "In Python: print(torch_mlc.explain(model, *inputs)).",
    "benchmark": "In a checkout: python -m benchmarks --help.",
    "benchmarks": "In a checkout: python -m benchmarks --help.",
    "settings": "They are shown by: options.",
    "clear": "Did you mean 'cache clear' or 'tune clear'?",
}


def near_command(asked: str, known: Iterable[str]) -> str:
    """The command that ``asked`` begins or is a slip of; "" for none."""
    asked = asked.lower()
    begun = [name for name in known if len(asked) > 1 and name.startswith(asked)]
    if len(begun) == 1:
        return begun[0]
    found = [(n, name) for name in known if (n := edit_distance(asked, name)) <= max(1, len(name) // 3)]
    return min(found)[1] if found else ""


class Commands(click.Group):
    """A group whose usage errors name the nearest command, or where else what is asked for is found."""

    elsewhere: Mapping[str, str] = {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = near_command(args[0], known)
            guess = f" Did you mean {near!r}?" if near else ""
            guess = f" {self.elsewhere[args[0]]}" if args[0] in self.elsewhere else guess
            ctx.fail(f"no command {args[0]!r}.{guess} There are: {', '.join(known)}.")
        return super().resolve_command(ctx, args)


class CommandLine(Commands):
    """The whole command line."""

    elsewhere = _ELSEWHERE


def tell(text: str) -> None:
    """Print a line on standard output, in characters that it can show; click would write UTF-8 where it says ASCII."""
    click.echo(text, file=sys.stdout)


def program_name() -> str:
    """How this command line was called: "torch-mlc", "python -m torch_mlc"."""
    return click.get_current_context().find_root().info_name or "torch-mlc"
