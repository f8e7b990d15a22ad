"""`torch-mlc info`."""

import platform
import sys
from importlib import metadata

import click
import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ... import __version__
from ...ir.target import Target
from ...runtime.plain_text import counted
from ...runtime.targets import cpu_target, target_for
from ..demo.train import cpp_compiler
from .cache import cache_here
from .tuned import searched_here, summary, tuned_here

PACKAGES = ("torch", "triton", "llvmlite", "sympy", "numpy")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed (needed for GPU targets)" if package == "triton" else "not installed"


def _described(target: Target) -> str:
    if target.is_gpu:
        return f"{target} ({target.cores} multiprocessors, {target.shared_bytes >> 10} KiB shared memory a block)"
    return f"{target} ({target.arch}, {target.cores} cores, {target.vector_bytes * 8}-bit vectors)"


def _targets() -> list[str]:
    """This machine's own targets."""
    found = [_described(cpu_target())]
    for i in range(torch.cuda.device_count()):
        found.append(f"{_described(target_for(f'cuda:{i}'))}: {torch.cuda.get_device_name(i)}")
    return found


@click.command()
def info() -> None:
    """Versions, targets, compilers found, the cache folder and its size."""
    disk = cache_here()
    rows = [("torch-mlc", __version__), ("python", f"{platform.python_version()} ({sys.platform})")]
    rows += [(package, _version(package)) for package in PACKAGES]
    rows += [("targets" if i == 0 else "", text) for i, text in enumerate(_targets())]
    if not torch.cuda.is_available():
        rows.append(("", "no GPU here; cuda:sm_NN and hip:gfxNNN compile all the same"))
    rows.append(("C++ compiler", f"{cpp_compiler() or 'not found'} (torch-mlc needs none; Inductor does on the CPU)"))
    rows.append(("cache folder", str(disk.folder)))
    rows.append(("", f"{counted(len(disk.entries()), 'entry', 'entries')}, {decimal(disk.size_bytes())}"))
    rows.append(("tuning", summary(tuned_here(), len(searched_here()))))
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table, soft_wrap=True)
