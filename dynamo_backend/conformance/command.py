"""`torch-mlc conformance`: the cases without pytest."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from ..cli.near import tell
from .given import json_object
from .kit.subject import Subject, UnknownBackendError
from .registry import CASES, UnknownCaseError, chosen
from .runner import run_case
from .table import listing, row, summary, write_json


def _object(text: str | None, option: str) -> dict[str, Any] | None:
    try:
        return None if text is None else json_object(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error


@click.command()
@click.option("--backend", default="mlc", show_default=True, help="Its name, or package.module:function.")
@click.option("--backend-options", metavar="JSON", help="The options that it is given.")
@click.option("--other-options", metavar="JSON", help="A second set, under which half types round otherwise.")
@click.option("--only", multiple=True, metavar="CASES", help="Run these alone: names, topics or globs.")
@click.option("--skip", multiple=True, metavar="CASES", help="Leave these out.")
@click.option("--json", "file", metavar="FILE", help="Write the results here.")
@click.option("--list", "list_them", is_flag=True, help="List the cases, and run nothing.")
def conformance(
    backend: str,
    backend_options: str | None,
    other_options: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    file: str | None,
    list_them: bool,
) -> None:
    """Check a backend of torch.compile against eager, in some 230 small programs that backends get wrong.

    The status is 1 where a case fails. `pytest --mlc-conformance` runs the same (docs/conformance.md)."""
    if list_them:
        tell(listing())
        return
    options = _object(backend_options, "--backend-options")
    try:
        subject = Subject(backend, options or {}, _object(other_options, "--other-options"))
        wanted = (chosen(only) if only else chosen(["*"])) - chosen(skip)
    except (UnknownBackendError, UnknownCaseError) as error:
        raise click.UsageError(str(error)) from error
    logging.disable(logging.CRITICAL)  # what torch tells of errors that cases cause
    rows = []
    for case in CASES:
        if case.name in wanted:
            rows.append(row(case.name, run_case(case, subject)))
            if rows[-1].status == "failed":
                tell(f"failed {case.name}: {rows[-1].told}")
    tell(summary(rows))
    if file:
        write_json(file, rows, backend, options)
    sys.exit(any(r.status == "failed" for r in rows))
