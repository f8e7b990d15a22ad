"""What the figures were measured on, and what they are measured against: copy bandwidth and matmul rate."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from .stats import spread
from .timing import TimingSettings, measure


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates measured in this run. ``copy``: bytes read plus bytes written per second; ``matmul``: flop per second."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    matmul_dtype: str
    # Of the suite ``generate``, whose steps read and hardly write.
    read_bytes_per_s: float | None = None

    def floor_s(self, nbytes: int, flops: int = 0) -> float:
        """The least time for moving ``nbytes`` and computing ``flops``, whichever takes longer."""
        return max(nbytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure_roofline(device: str, dtype: torch.dtype, clock: str = "wall") -> Roofline:
    """Copy a tensor larger than any cache, multiply two square matrices; medians of seven samples each, by the clock
    that what is set against them is timed by."""
    cuda = torch.device(device).type == "cuda"
    source = torch.ones((1 << 30 if cuda else 1 << 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 1536
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    samples = measure(
        {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(a, b, out=product)},
        TimingSettings(device, rounds=7, clock=clock),
    )
    copy_s, matmul_s = (spread(samples[name].seconds).median for name in ("copy", "matmul"))
    return Roofline(2 * source.nbytes / copy_s, 2 * side**3 / matmul_s, str(dtype).removeprefix("torch."))


def describe_machine(device: str) -> dict[str, object]:
    """Processor, cores, threads, load and, with CUDA, the GPU and its clock as found. Nothing is changed."""
    about: dict[str, object] = {
        "processor": _processor(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return about


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the figures; None where one is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torch-mlc", "triton", "llvmlite", "numpy", "sympy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions
