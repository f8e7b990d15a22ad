"""`torch-mlc cache list|clear`."""

import json
import time
from datetime import datetime, timezone

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ...runtime.cache.cache import DiskCache
from ...runtime.plain_text import counted
from .near import Commands, program_name, tell
from .options import cache_folder_here
from .tuned import forget_tuned, searched_here, summary, tuned_here


def cache_here() -> DiskCache:
    """The disk cache that the environment's settings name."""
    return DiskCache(cache_folder_here())


def ago(seconds: float) -> str:
    """A span of time in its largest whole unit: 90 → "1 min"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


@click.group(cls=Commands)
def cache() -> None:
    """List or clear the disk cache (MLC_CACHE_DIR)."""


@cache.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows at most.")
@click.option("--json", "as_json", is_flag=True, help="All of it, as JSON: sizes in bytes, times as ISO 8601.")
def list_entries(limit: int, as_json: bool) -> None:
    """What the cache holds, the last used first."""
    disk = cache_here()
    entries = disk.entries()
    if as_json:
        rows = [
            {
                "kind": e.kind, "key": e.key, "size": e.size, "description": e.description,
                "used": datetime.fromtimestamp(e.used, timezone.utc).isoformat(timespec="seconds"),
            }
            for e in entries
        ]  # fmt: skip
        whole = {"folder": str(disk.folder), "size": sum(e.size for e in entries), "entries": rows}
        tell(json.dumps(whole, indent=2))
        return
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
            tell(f"… and {len(entries) - limit} more; --limit shows them")
    tell(f"{counted(len(entries), 'entry', 'entries')}, {decimal(disk.size_bytes())}, in {disk.folder}")


@cache.command()
@click.option("--tuning", is_flag=True, help="What tuning has measured, too.")
def clear(tuning: bool) -> None:
    """Remove every compiled graph and kernel.

    Tuning results stay unless --tuning is given, and so does compiled code in running processes."""
    disk = cache_here()
    size = disk.size_bytes()
    removed = disk.clear()
    tell(f"removed {counted(removed, 'entry', 'entries')}, {decimal(size)}, from {disk.folder}")
    if tuning:
        tell(forget_tuned())
        return
    tuned, searched = tuned_here(), searched_here()
    if tuned or searched:
        mend = f"`{program_name()} cache clear --tuning` removes them"
        tell(f"kept {summary(tuned, len(searched))}, which still decide; {mend}")
