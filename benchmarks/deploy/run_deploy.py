"""Suite ``deploy``: a model is exported for each runtime, then opened and called in a process of its own, in turns with
the others. What is written, how long that takes, what opening costs and the memory that a process needs are told, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.export import export
from torch.utils._pytree import tree_leaves

from ..accuracy import judge
from ..models.spec import Inputs, ModelSpec, Size
from ..peers import EAGER
from ..run_compile import child_environment
from ..schema import CaseResult, PeerResult
from ..stats import calls_for, interleave
from ..timing import TimingSettings

RUNTIMES = (EAGER, "compiled", "library", "aotinductor", "onnxruntime")
# Others have to be installed, or an interpreter that has them named.
USUAL = RUNTIMES[:4]


@dataclass(frozen=True, slots=True)
class DeploySettings:
    """``pythons`` are interpreters of some runtimes, by name; that of this process is the others'."""

    runtimes: Sequence[str]
    pythons: Mapping[str, str]
    threads: int
    timing: TimingSettings

    @property
    def told(self) -> dict[str, object]:
        """Those that decide figures, for the results."""
        timing = self.timing
        return {
            "runtimes": list(self.runtimes),
            "threads": self.threads,
            "rounds": timing.rounds,
            "least_s": timing.least_s,
            "warmup_s": timing.warmup_s,
            "clock": timing.clock,
        }


class RuntimeFailure(RuntimeError):
    """What a runtime said when it failed, or how its process ended."""


class RuntimeProcess:
    """A process with one model under one runtime."""

    def __init__(self, runtime: str, folder: Path, settings: DeploySettings) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
        command = [settings.pythons.get(runtime, sys.executable), "-m", "benchmarks.deploy.worker", runtime]
        with (folder / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                [*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=child_environment(folder) | threads,
            )  # fmt: skip
        self._folder = folder

    def ask(self, what: str, **given: object) -> Mapping[str, Any]:
        """Do something and wait for the answer. Raises: RuntimeFailure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"do": what, **given}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = (self._folder / "stderr").read_text(errors="replace").split("\n")[-4:]
            raise RuntimeFailure(f"the process ended with {self._process.wait()}: {' '.join(' '.join(last).split())}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeFailure(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it has ended itself
                    stream.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_deploy(spec: ModelSpec, size: Size, settings: DeploySettings) -> CaseResult:
    """One model in float32 under every runtime. One that fails has its error in its result and is not timed."""
    model = spec.build(size).eval()
    inputs = spec.inputs(size).args
    program = export(model, tuple(a.clone() for a in inputs))
    arrays = {f"{k:03}": a.numpy() for k, a in enumerate(inputs)}
    plain, exact = (of_eager(spec, size, inputs, dtype) for dtype in (torch.float32, torch.float64))
    weights = sum({t.data_ptr(): t.nbytes for t in (*program.state_dict.values(), *program.constants.values())
                   if isinstance(t, Tensor)}.values())  # fmt: skip
    result = CaseResult(spec.name, size, "inference", "float32", weights)
    with tempfile.TemporaryDirectory(prefix="mlc_bench_") as root, ExitStack() as stack:
        running: dict[str, RuntimeProcess] = {}
        given = Path(root, "program.pt2"), Path(root, "inputs.npz")
        torch.export.save(program, given[0])
        np.savez(given[1], **arrays)
        for runtime in settings.runtimes:
            outcome = result.peers[runtime] = PeerResult()
            folder = Path(root) / runtime
            folder.mkdir()
            for file in given:
                (folder / file.name).hardlink_to(file)
            try:
                with closing(RuntimeProcess(runtime, folder, settings)) as writer:
                    written = writer.ask("write", threads=settings.threads)
                opened = stack.enter_context(closing(RuntimeProcess(runtime, folder, settings)))
                told = opened.ask("open", threads=settings.threads)
            except RuntimeFailure as error:
                outcome.error = str(error)
                continue
            running[runtime] = opened
            outcome.first_call_s = told["open_s"]
            outcome.phases = {"write": written["write_s"], "import": told["import_s"]}
            outcome.counts["files"] = {"bytes": written["bytes"]}
            accuracy = judge(found(folder), plain, exact, torch.float32)
            outcome.accuracy = asdict(accuracy) | {"ok": accuracy.ok}
        take(running, result, settings.timing)
    return result


def take(running: Mapping[str, RuntimeProcess], result: CaseResult, timing: TimingSettings) -> None:
    """Samples of every runtime in interleaved rounds; then what each process has held."""
    left = dict(running)

    def ask(name: str, what: str, **given: object) -> Mapping[str, Any] | None:
        try:
            return left[name].ask(what, **given)
        except RuntimeFailure as error:
            result.peers[name].error = str(error)
            del left[name]
            return None

    for name in running:
        warmed = ask(name, "warm_up", seconds=timing.warmup_s)
        told = ask(name, "sample", clock=timing.clock, calls=2) if warmed is not None else None
        if told is not None:
            result.peers[name].calls_per_sample = calls_for(told["seconds"], timing.least_s)
    for order in interleave(list(running), timing.rounds) if running else ():
        for name in [n for n in order if n in left]:
            peer = result.peers[name]
            told = ask(name, "sample", clock=timing.clock, calls=peer.calls_per_sample)
            if told is not None:
                peer.samples.append(told["seconds"])
    for name in list(left):
        told = ask(name, "memory")
        if told is not None:
            result.peers[name].counts["process"] = {"resident": told["resident"]}


def of_eager(spec: ModelSpec, size: Size, inputs: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the model gives in a type, from the same weights and inputs, which it may change copies of."""
    model = spec.build(size).eval().to(dtype)
    with torch.no_grad():
        return named(model(*Inputs(tuple(inputs), inputs[0]).cast(dtype).copied().args))


def named(results: object) -> dict[str, Tensor]:
    """Results by their places."""
    return {f"{k:03}": r.detach().clone() for k, r in enumerate(tree_leaves(results))}


def found(folder: Path) -> dict[str, Tensor]:
    """What a runtime's first call has left."""
    with np.load(folder / "results.npz") as results:
        return {name: torch.from_numpy(results[name]) for name in results.files}


def runtimes_option(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    """Runtimes from ``eager,library``."""
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    unknown = [n for n in names if n not in RUNTIMES]
    if unknown or not names:
        raise click.BadParameter(f"there is no runtime {unknown[0] if unknown else text!r}; give {', '.join(RUNTIMES)}")
    return names


def pythons_option(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """Interpreters from ``RUNTIME=PATH``."""
    result = {}
    for text in given:
        name, _sign, path = text.partition("=")
        if name not in RUNTIMES or not Path(path).is_file():
            raise click.BadParameter(f"{text!r} is no RUNTIME=PATH of one of {', '.join(RUNTIMES)} and a Python")
        result[name] = path
    return result


__all__ = [
    "RUNTIMES", "USUAL", "DeploySettings", "RuntimeFailure", "RuntimeProcess", "pythons_option", "run_deploy",
    "runtimes_option",
]  # fmt: skip
