"""A process that does what a module says: ``python -I service_worker.py <parent> <seconds>``.

The first request names the module, by ``service``, and is for it as all that follow are. ``module.service()`` makes
what answers requests. The program that started the process is not run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Service:
    def __init__(self) -> None:
        self._answer: Any = None

    def __call__(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        if self._answer is None:
            self._answer = importlib.import_module(request["service"]).service()
        answer: tuple[dict[str, Any], Sequence[bytes]] = self._answer(request, parts)
        return answer


def _wire() -> Any:
    """The file beside this one: where our package is, the first request tells."""
    spec = importlib.util.spec_from_file_location("torch_mlc_worker_wire", Path(__file__).with_name("worker_wire.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _wire().serve(int(sys.argv[1]), float(sys.argv[2]), _Service())
