"""The programs of one graph under other decisions: planned and built here, run in a process of their own."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...ir.errors import MlcError
from ...ir.passes import Runner
from ...ir.text.structure import structural_key
from ...runtime.compile.kernels import KernelStore
from ...runtime.timing import PhaseTimer
from ...runtime.tuning.measure import MeasureError
from ...runtime.tuning.worker_race import MeasuringProcess, Request, WorkerRace, failure_of, process_of
from ...scheduler.cost.begun import Times
from ...scheduler.decisions import Decider, DecisionOverrides
from ...scheduler.tuning.flips import PlannedGraph
from ...scheduler.tuning.measurer import Entered, Failure, MeasuringError
from ..caches.saved_program import SavedProgramError, save_program
from ..compiling.compiled import CompiledGraph
from ..compiling.graph_host import built, program_of
from ..compiling.job import Job
from ..compiling.pass_lists import context_of
from ..compiling.plans import Plan, plan_of
from ..compiling.tuning import Tuning
from ..importing.graph_key import GraphKey
from .inputs import TypicalInputs, typical_inputs

SERVICE = f"{__package__}.program_service"


class ProgramRace(WorkerRace[bytes]):
    """Pickled programs of one graph that run on the same inputs and take turns."""

    def __init__(self, inputs: TypicalInputs, process: MeasuringProcess | None = None) -> None:
        super().__init__(process_of(SERVICE) if process is None else process)
        self._inputs = inputs

    def enter(self, program: bytes) -> Entered | Failure:
        """Load a program, run it once and compare its results with those of the first. Raises MeasuringError."""
        with self._ended_by_interrupts():
            try:
                return self._named(self._prepared_new(program))
            except MeasureError as error:
                return failure_of(error)

    def _about(self) -> Request:
        return {"inputs": self._inputs.plain(), "threads": torch.get_num_threads()}, ()

    def _of(self, candidate: bytes) -> Request:
        return {}, (candidate,)

    def _hash_of(self, candidate: bytes) -> str:
        return hashlib.sha256(candidate).hexdigest()[:32]


@dataclass(slots=True)
class JobPrograms:
    """Programs of the graph of a job (``GraphPrograms``), with the schedules of their rules."""

    job: Job
    key: GraphKey | None
    # Kernels that several of them have are compiled once; no cache has any part in it.
    store: KernelStore = field(default_factory=lambda: KernelStore(None))
    race: ProgramRace | None = None

    def plan(self, chosen: DecisionOverrides) -> PlannedGraph:
        """The calls of the graph with other decisions. Raises MlcError."""
        options = self.job.options
        decider = self._decider(chosen)
        plan = plan_of(self._apart(decider), self.key)
        fusion = plan.fusion
        machine = context_of(options).target_of("cpu").machine
        times = Times(fusion.graph, {**fusion.functions, **fusion.given}, machine)
        seconds = sum(times.of(n) for n in fusion.graph.nodes) * 1e-9
        return PlannedGraph(chosen, structural_key(fusion.graph, fusion.module), seconds, decider.records, plan)

    def enter(self, planned: PlannedGraph) -> Entered | Failure:
        """Build a program, or take one that is built, and have it run once. Raises MeasuringError."""
        given = planned.plan
        try:
            program = given if isinstance(given, bytes) else self.program(given, planned.chosen)
        except (MlcError, RuntimeError, MemoryError) as error:
            return failure_of(error)
        if self.race is None:
            raise MeasuringError("no graph was planned that could be run")
        return self.race.enter(program)

    def copy(self, number: int) -> Entered | Failure:
        return self._running.copy(number)

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        return self._running.samples(numbers, rounds)

    def leave(self, numbers: Sequence[int]) -> None:
        self._running.leave(numbers)

    def close(self) -> None:
        """Let the process forget the graph."""
        if self.race is not None:
            self.race.close()

    def program(self, plan: Plan, chosen: DecisionOverrides) -> bytes:
        """A plan as a program with the schedules of its rules, as bytes. Raises MlcError."""
        job = self._apart(self._decider(chosen))
        kernels, host = built(job, plan, Tuning(None, None, job.timer))
        self._know(plan)
        return saved(job, host, kernels)

    def tuned(self, plan: Plan, host: Any, kernels: Mapping[str, Any]) -> bytes:
        """A program that was built with other schedules, as bytes. Raises MlcError."""
        self._know(plan)
        return saved(self.job, host, kernels)

    @property
    def _running(self) -> ProgramRace:
        assert self.race is not None, "nothing has entered"
        return self.race

    def _know(self, plan: Plan) -> None:
        if self.race is None:
            count = len(self.job.gm.graph.find_nodes(op="placeholder"))
            self.race = ProgramRace(typical_inputs(plan.imported, count, self.job.devices, self.job.given))

    def _decider(self, chosen: DecisionOverrides) -> Decider:
        return Decider(self.job.options.decisions or DecisionOverrides(), chosen, locked=self.job.locked)

    def _apart(self, decider: Decider) -> Job:
        """The job as it is compiled for a race: nothing of it is told, dumped or cached, and a kernel that does not
        compile is an error."""
        options = replace(self.job.options, dump_dir=None, log=(), strict=True, verify=0, lock=None)
        return replace(
            self.job, options=options, decider=decider, run=Runner(), timer=PhaseTimer(), store=self.store, fresh=False,
            load=False,
        )  # fmt: skip


def saved(job: Job, host: Any, kernels: Mapping[str, Any]) -> bytes:
    """A program as bytes that another process loads. Raises SavedProgramError where that cannot be."""
    compiled = job.with_named(
        CompiledGraph(job.name, host.code.told, None, job.timer, kept=program_of(job, host, kernels))
    )
    try:
        return pickle.dumps(save_program(compiled, job.options))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SavedProgramError(f"{job.name} cannot be given to another process: {error}") from error
