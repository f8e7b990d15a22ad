"""`torch-mlc options`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ...runtime.settings.options import (
    OptionError,
    Options,
    OptionSpec,
    option_specs,
    options_markdown,
    typed_value,
    variables_in,
)
from .near import tell


def options_here() -> Options:
    """The settings that the environment gives; a wrong one ends the command with its message."""
    try:
        return Options.resolve(None, None, os.environ)
    except OptionError as error:
        raise click.ClickException(str(error)) from error


def cache_folder_here() -> Path:
    """The cache folder that the environment's settings name; something else in its place ends the command."""
    folder = options_here().cache_dir
    if folder.exists() and not folder.is_dir():
        raise click.ClickException(f"{folder} is a file, not a folder: name another by MLC_CACHE_DIR, or remove it")
    return folder


@dataclass(frozen=True, slots=True)
class OptionFlag:
    """A setting as it is here: its value as one types it, and the variable that it comes from ("" for its default)."""

    spec: OptionSpec
    value: str
    variable: str


def settings_here() -> list[OptionFlag]:
    """Every setting, in the order of the documentation."""
    now, found = options_here(), variables_in(os.environ)
    settings = []
    for spec in option_specs():
        given = found.given.get(spec.variable)
        value = typed_value(spec, getattr(now, spec.name))
        if given is not None and spec.name == "schedules":
            value = given.text  # not what was read from there
        settings.append(OptionFlag(spec, value, given.variable if given is not None else ""))
    return settings


@click.command()
@click.option("--changed", is_flag=True, help="Only those that the environment sets.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with what each value may be.")
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md instead.")
def options(changed: bool, as_json: bool, markdown: bool) -> None:
    """Every setting, its value here and where that comes from.

    torch.compile(options={…}) goes over TORCH_MLC_* variables, those over MLC_*, and those over defaults."""
    if markdown:
        tell(options_markdown().rstrip("\n"))
        return
    settings = [s for s in settings_here() if s.variable or not changed]
    foreign = variables_in(os.environ).foreign
    if as_json:
        rows = [
            {
                "name": s.spec.name, "variable": s.spec.variable, "value": s.value, "from": s.variable or "default",
                "default": s.spec.shown_default, "values": s.spec.values, "doc": s.spec.doc,
            }
            for s in settings
        ]  # fmt: skip
        tell(json.dumps({"settings": rows, "left_alone": list(foreign)}, indent=2))
        return
    console = Console()
    for s in settings:
        head = Text.assemble((s.spec.name, "bold"), " = ", (s.value, "green" if s.variable else ""))
        origin = f"from {s.variable}" if s.variable else f"default; {s.spec.variable}"
        head.append(f"   ({origin}: {s.spec.values})", "dim")
        _line(console, head, 0)
        _line(console, Text(s.spec.doc), 4)
    if not settings:
        tell("every setting has its default: the environment sets none")
    for name in foreign:
        tell(f"{name} is no setting of torch-mlc, and is left alone")


def _line(console: Console, text: Text, indent: int) -> None:
    """One line; on a terminal that is too narrow for it, several of the same indent."""
    if console.is_terminal:
        console.print(Padding.indent(text, indent))
    else:
        tell(" " * indent + text.plain)
