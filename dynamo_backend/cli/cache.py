"""`python -m torch_mlc cache list|clear`."""

import time

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ...runtime.cache import DiskCache
from .options import options_here


def cache_here() -> DiskCache:
    """The disk cache that the environment's settings name."""
    return DiskCache(options_here().cache_dir)


def ago(seconds: float) -> str:
    """A span of time in its largest whole unit: 90 → "1 min"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


@click.group()
def cache() -> None:
    """List or clear the disk cache (MLC_CACHE_DIR)."""


@cache.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows at most.")
def list_entries(limit: int) -> None:
    """What the cache holds, the last used first."""
    disk = cache_here()
    entries = disk.entries()
    total = f"{len(entries)} entries, {decimal(disk.size_bytes())}, in {disk.folder}"
    if entries:
        now = time.time()
        table = Table(caption_justify="left")
        for heading, justify in (("kind", "left"), ("key", "left"), ("size", "right"), ("used", "right"), ("", "left")):
            table.add_column(heading, justify=justify, no_wrap=bool(heading))  # type: ignore[arg-type]
        for entry in entries[:limit]:
            size, used = decimal(entry.size), f"{ago(now - entry.used)} ago"
            table.add_row(entry.kind, entry.key[:12], size, used, entry.description)
        Console().print(table)
        if len(entries) > limit:
            click.echo(f"… and {len(entries) - limit} more; --limit shows them")
    click.echo(total)


@cache.command()
def clear() -> None:
    """Remove every entry; compiled code in running processes stays."""
    disk = cache_here()
    size = disk.size_bytes()
    removed = disk.clear()
    click.echo(f"removed {removed} entries, {decimal(size)}, from {disk.folder}")
