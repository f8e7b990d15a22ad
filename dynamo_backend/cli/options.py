"""`python -m torch_mlc options`."""

import os

import click
from rich.console import Console
from rich.table import Table

from ...runtime.options import OptionError, Options, option_specs, options_markdown


def options_here() -> Options:
    """The settings that the environment gives; a wrong one ends the command with its message."""
    try:
        return Options.resolve(None, None, os.environ)
    except OptionError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md instead.")
def options(markdown: bool) -> None:
    """Every setting, its value here and where that comes from."""
    if markdown:
        click.echo(options_markdown(), nl=False)
        return
    now = options_here()
    table = Table(caption="torch.compile(options={…}) goes over these.", caption_justify="left")
    for heading in ("options= key", "variable", "value here", "from", "what it does"):
        table.add_column(heading, overflow="fold")
    for spec in option_specs():
        value = getattr(now, spec.name)
        origin = "environment" if os.environ.get(spec.variable, "").strip() else "default"
        shown = spec.shown_default if value is None else ",".join(value) or "none" if spec.name == "log" else str(value)
        table.add_row(spec.name, spec.variable, shown, origin, spec.doc)
    Console().print(table)
