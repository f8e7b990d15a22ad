"""`torch-mlc export`."""

from pathlib import Path

import click
import torch
from rich.filesize import decimal

from ..export.errors import ExportError
from ..export.export import export as export_model
from .near import tell


@click.command()
@click.argument("programs", metavar="MODEL.pt2 | FUNCTION=MODEL.pt2 …", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write.")
@click.option("--name", default="model", show_default=True, help="What the functions in C begin with.")
@click.option(
    "--targets", default="host", show_default=True, help="Processors or GPUs (cuda:sm_90), with commas between them."
)
@click.option("--libraries", default="", help="Libraries that it may call (cblas); none by default.")
def export(programs: tuple[str, ...], out: Path, name: str, targets: str, libraries: str) -> None:
    """Write programs that torch.export.save has written as a library that runs without Python and torch.

    With several, each has the name of its function before it: prefill=a.pt2 decode=b.pt2. They share weights and state.
    """
    files = dict(p.partition("=")[::2] if "=" in p else ("forward", p) for p in programs)
    if len(files) < len(programs):
        raise click.UsageError("several programs need a name each: prefill=a.pt2 decode=b.pt2")
    loaded = {}
    for function, file in files.items():
        try:
            loaded[function] = torch.export.load(file)
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            raise click.ClickException(f"{file} is no program that torch.export.save has written: {error}") from error
    try:
        export_model(loaded, out, targets=_words(targets), libraries=_words(libraries), name=name)
    except ExportError as error:
        raise click.ClickException(str(error)) from error
    for path in sorted(out.iterdir()):
        if path.is_file():
            tell(f"{path}  {decimal(path.stat().st_size)}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
