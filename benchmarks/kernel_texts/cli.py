"""The command line: write the texts of the code at hand, or compare them with those of another commit."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click
from rich.console import Console

from ..cli import progress_bar, select
from ..models.spec import SIZES, Size
from .compare import Comparison, told
from .corpus import Case, corpus
from .folder import FolderError, Index, made_here, new_folder, read_index, read_texts, write_texts
from .taking import FAILED, TextsError, folder_of, texts_of

Path_ = click.Path(file_okay=False, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=Path_, help="Write the texts of the code at hand into this new folder.")
@click.option("--against", type=Path_, help="Compare them with the texts in this folder.")
@click.option("--filter", "patterns", multiple=True, help="Cases whose name contains this; may be given again.")
@click.option("--size", type=click.Choice(SIZES), help="Of models: small, or that of the folder to compare with.")
@click.option("--diffs", type=click.IntRange(min=0), default=3, help="Differences that are printed.")
def main(out: Path | None, against: Path | None, patterns: tuple[str, ...], size: Size | None, diffs: int) -> None:
    """Texts of all kernels and host programs of the kernel suite, the models and the static workloads, for a CPU and a
    GPU: written before a refactoring with --out, and compared after it with --against.

    Nothing is assembled or run, and no GPU is needed. The exit status is 1 where a text differs, or where a workload
    cannot be compiled.
    """
    if out is None and against is None:
        raise click.UsageError(
            "say where the texts go (--out FOLDER), or what they are compared with (--against FOLDER)"
        )
    # A pipe or file has no width of its own, and rich's 80 columns would cut every line.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    try:
        before = read_index(against) if against is not None else None
        if out is not None:
            new_folder(out)
    except FolderError as error:
        raise click.UsageError(str(error)) from error
    if before is not None and size not in (None, before.size):
        raise click.BadParameter(f"the texts in {against} are of size {before.size}", param_hint="--size")
    here = Index(size or (before.size if before is not None else "small"), made_here(), patterns)
    if before is not None:
        other = [f"{k} {v}, here {here.made_by.get(k)}" for k, v in before.made_by.items() if here.made_by.get(k) != v]
        if other:
            console.print(f"differences may not be the code's: it was {'; '.join(other)}", style="yellow")
    found: dict[str, tuple[Case, str]] = {}
    for case in corpus(here.size):
        for mode in case.modes:
            folder = folder_of(case, mode)
            found[folder] = case, mode
            here.cases[folder] = f"{case.name}, {case.target}, {mode}"
    known = {**(before.cases if before is not None else {}), **here.cases}
    chosen = set(select(known.values(), patterns))
    if before is not None:
        here.patterns = patterns or before.patterns
        chosen &= set(select(known.values(), before.patterns))
    here.cases = {folder: name for folder, name in here.cases.items() if name in chosen}
    comparison, failed = Comparison(), []
    with progress_bar(console) as bar:
        folders = [folder for folder, name in known.items() if name in chosen]
        task = bar.add_task("texts", total=len(folders))
        for folder in folders:
            bar.update(task, description=known[folder])
            texts = _texts(*found[folder]) if folder in found else {}
            failed += [
                f"{place}: {text.strip()}" for place, text in texts.items() if FAILED in place.rpartition("/")[2]
            ]
            was = read_texts(against, folder) if against is not None else None
            comparison.add(was, texts)
            if out is not None:
                write_texts(out, texts)
            bar.advance(task)
    if out is not None:
        here.write(out)
    _tell(console, comparison, failed, against, diffs)
    if out is not None:
        console.print(f"wrote {out}", soft_wrap=True)
    if comparison.differences or any(f"/{FAILED}.txt: " in line for line in failed):
        sys.exit(1)


def _texts(case: Case, mode: str) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel that does not compile is a text, and told at the end
        try:
            return texts_of(case, mode)
        except TextsError as error:
            raise click.ClickException(str(error)) from error


def _tell(console: Console, comparison: Comparison, failed: list[str], against: Path | None, diffs: int) -> None:
    title = "texts of the code at hand" + (f" against {against}" if against is not None else "")
    console.print(comparison.table(title, compared=against is not None))
    for line in told(comparison.differences, diffs):
        console.print(line, soft_wrap=True)
    for text in failed:
        console.print(f"does not compile: {text}", style="bold red", soft_wrap=True, markup=False, highlight=False)
