"""One decision for all ranks of a job: kernel *i* is measured by rank *i* mod *n*, and all of them take what it found.

Ranks that ran different schedules would add in different orders, and tuning would take *n* times as long as it has to.
What is decided of a kernel is put once into the job's store, by whoever is first; nobody writes over it. A rank that
waits in vain decides for the default schedule, in the same way: also then there is one decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...ir.target import Target
from ...scheduler.error import ScheduleError
from ...scheduler.schedule.trace import Trace
from ...scheduler.tuning.database import target_key
from ...scheduler.tuning.database.rows import checked_trace
from ..cache.fingerprint import environment_fingerprint
from ..log import logger

_LOG = logger(__name__)
# What stands in the store for the default schedule.
_DEFAULT = "default"
_PREFIX = "torch_mlc tuning"


class Ranks:
    """The ranks of a job. ``store`` is one of torch.distributed's, which all of them reach; ``wait`` the seconds that a
    rank waits for another one's decision."""

    def __init__(self, store: Any, rank: int, count: int, wait: float = 300.0) -> None:
        self.store = store
        self.rank = rank
        self.count = count
        self.wait = wait

    @staticmethod
    def of_job(wait: float = 300.0) -> Ranks | None:
        """The ranks of this process's job; None where it is the only one."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        store = dist.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        return Ranks(store, dist.get_rank(), dist.get_world_size(), wait)

    def is_mine(self, number: int) -> bool:
        """Whether this rank measures the kernel of that number."""
        return number % self.count == self.rank

    def agreed(
        self,
        target: Target,
        workloads: Sequence[str],
        decide: Callable[[int], Trace | None],
        prepare: Callable[[list[int]], None] = lambda numbers: None,
    ) -> list[Trace | None]:
        """The schedule of each workload (its structural key), the same on all ranks; None for the default one.

        ``decide`` gives what this rank finds for the workload of that number, in general by measuring it. It is asked
        for this rank's share alone, of all of which it is asked before the first decision of others is waited for.
        What it raises passes through, and the others get the default. ``prepare`` is told before which it will be.
        """
        keys = [f"{environment_fingerprint()}/{target_key(target)}/{workload}" for workload in workloads]
        mine = [k for k, key in enumerate(keys) if self.is_mine(k) and not self.store.check([key])]
        prepare(mine)
        for number in mine:
            key = keys[number]
            if not self.store.check([key]):
                found: Trace | None = None
                try:
                    found = decide(number)
                finally:
                    self._put(key, _DEFAULT if found is None else found.to_json())
        until = time.monotonic() + self.wait
        return [self._trace(self._taken(key, until)) for key in keys]

    def _put(self, key: str, value: str) -> str:
        """Decide, unless that is done: what is decided now."""
        # Atomic: a key that nobody has set is expected to be empty.
        decided: bytes = self.store.compare_set(key, "", value)
        return decided.decode()

    def _taken(self, key: str, until: float) -> str:
        """What is decided; the default one where nobody does in time."""
        try:
            self.store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError:  # torch's DistStoreError among them
            _LOG.warning("no rank has tuned a kernel in %g s; all of them take its default schedule", self.wait)
            return self._put(key, _DEFAULT)
        found: bytes = self.store.get(key)
        return found.decode()

    def _trace(self, text: str) -> Trace | None:
        if text == _DEFAULT:
            return None
        try:
            return checked_trace(text)
        except ScheduleError as error:
            _LOG.warning("what another rank has decided is no schedule (%s)", error.reason)
            return None
