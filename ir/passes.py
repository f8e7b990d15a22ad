"""Passes over modules, and the manager that runs them: verified before and after, dumped as numbered scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import MlcError
from .graph.graph import IRModule
from .text.printer import show
from .verify.verify import verify


class PassError(MlcError):
    """A pass failed, or left IR that breaks a rule; names the pass and, where dumps are kept, the file of its input."""


class Pass(Protocol):
    """A rewrite of a module. ``name`` is a verb, and the name of its file, function and dump as well."""

    @property
    def name(self) -> str: ...

    def run(self, module: IRModule) -> IRModule:
        """The module rewritten; the same object where nothing changed."""
        ...


# What is told of each pass: its name, seconds of its own (without verifier and dumps), and whether it changed anything.
OnPass = Callable[[str, float, bool], None]


@dataclass(frozen=True, slots=True)
class PassManager:
    """Runs passes in order.

    ``dump_dir``: folder in which each graph gets a folder with ``00_input.txt``, ``01_<pass>.txt``, …; None writes
    nothing. ``verify``: check the rules of the IR before the first pass and after each. ``on_pass``: called after
    each pass (for timing).
    """

    passes: Sequence[Pass]
    dump_dir: Path | None = None
    verify: bool = True
    on_pass: OnPass | None = None

    def run(self, module: IRModule) -> IRModule:
        """The module after every pass.

        Raises:
            PassError: a pass raised, or its result breaks a rule; the cause is chained. An input that breaks a rule is
                reported as such, before any pass has run.
        """
        folder = None if self.dump_dir is None else self.dump_dir / module.main
        self._check(module, "the input of the passes", folder)
        self._dump(folder, 0, "input", module)
        for number, step in enumerate(self.passes, 1):
            start = time.perf_counter()
            try:
                after = step.run(module)
            except Exception as error:
                where = self._dump(folder, number, f"{step.name}_failed", module)
                raise PassError(f"pass {step.name}: {error}{_see('its input', where)}") from error
            seconds = time.perf_counter() - start
            changed = after is not module
            if changed:
                self._check(after, f"pass {step.name}", folder, module, number)
            self._dump(folder, number, step.name, after)
            if self.on_pass is not None:
                self.on_pass(step.name, seconds, changed)
            module = after
        return module

    def _check(
        self, module: IRModule, who: str, folder: Path | None, before: IRModule | None = None, number: int = 0
    ) -> None:
        if not self.verify:
            return
        try:
            verify(module)
        except MlcError as error:
            name = who.removeprefix("pass ").replace(" ", "_")
            self._dump(folder, number, f"{name}_failed", before or module)
            where = self._dump(folder, number, f"{name}_broken", module)
            raise PassError(f"{who}: {error}{_see('what it made', where)}") from error

    @staticmethod
    def _dump(folder: Path | None, number: int, name: str, module: IRModule) -> Path | None:
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:02d}_{name}.txt"
        path.write_text(show(module))
        return path


def _see(what: str, path: Path | None) -> str:
    return "" if path is None else f"\n{what} is in {path}"
