"""Suite ``compile``: first calls in fresh processes, with empty caches (cold) and with those just filled (warm)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .peers import EAGER, Peer
from .schema import CaseResult, PeerResult
from .stats import interleave

MODEL = "gpt2_d128"
LAYERS = (2, 12, 48)
STATES = ("cold", "warm")
# TORCH_MLC_* goes over MLC_*, whichever the caller has set.
CACHE_VARIABLES = ("TORCH_MLC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
TIMEOUT_S = 1800


def child_environment(cache: Path) -> dict[str, str]:
    """The environment of this process with every compiler's cache in a folder of its own under ``cache``."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    caches = {name: str(cache / name.lower()) for name in CACHE_VARIABLES}
    for folder in caches.values():
        Path(folder).mkdir(mode=0o700, exist_ok=True)
    return {**os.environ, **caches, "PYTHONPATH": path}


def run_child(peer: str, layers: int, mode: str, device: str, size: str, dynamic: bool, cache: Path) -> dict[str, Any]:
    """One first call in a new process. Raises: RuntimeError with the end of its output."""
    out = cache / "times.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compile_child", "--model", MODEL, "--size", size]
    command += ["--layers", str(layers), "--peer", peer, "--mode", mode, "--device", device, "--out", str(out)]
    command += ["--dynamic"] if dynamic else []
    try:
        done = subprocess.run(
            command, env=child_environment(cache), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took longer than {TIMEOUT_S} s") from error
    if done.returncode != 0 or not out.exists():
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(out.read_text())


def run_compile(
    layers: int,
    mode: str,
    peers: Sequence[Peer],
    device: str,
    size: str,
    dynamic: bool,
    repeat: int,
    on_round: Callable[[], object] = lambda: None,
) -> list[CaseResult]:
    """Cold and warm first calls of every compiling peer, ``repeat`` times each with new folders every time."""
    names = [peer.name for peer in peers if peer.name != EAGER]
    cases = {state: CaseResult(MODEL, f"{layers} layers, {state}", mode, "float32") for state in STATES}
    for case in cases.values():
        case.peers = {name: PeerResult() for name in names}
    for order in interleave(names, repeat) if names else ():
        for name in order:
            with TemporaryDirectory(prefix="mlc_bench_") as folder:
                for state in STATES:
                    outcome = cases[state].peers[name]
                    try:
                        record = run_child(name, layers, mode, device, size, dynamic, Path(folder))
                    except RuntimeError as error:
                        outcome.error = str(error)
                        break
                    outcome.samples.append(record["total_s"])
                    outcome.phases = record["phases"] | {f"own: {k}": v for k, v in record["own_phases"].items()}
                    outcome.counts = {"all": record["counts"]}
        on_round()
    return list(cases.values())
