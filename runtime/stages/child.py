"""The side of a process that runs checks (``process.py``)."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]


def serve(request: str, check: Callable[[str], Iterable[Row]], well: Callable[[], bool] = lambda: True) -> None:
    """Run the checks of a request and write their rows. ``check`` gives those of one name as they are found.

    What a check raises is its last row, ``{"error": text}``. Where things are then not ``well`` any more (a GPU whose
    context is gone), the process ends, and the rest of the checks is for another one. A check that takes longer than
    its time ends the process with its stack.
    """
    asked = json.loads(request)
    faulthandler.enable()
    with os.fdopen(asked["rows"], "w") as channel:

        def write(row: Row) -> None:
            channel.write(json.dumps(row) + "\n")
            channel.flush()

        for name in asked["checks"]:
            write({"begin": name})
            faulthandler.dump_traceback_later(asked["each"], exit=True)
            failed = False
            try:
                for row in check(name):
                    write(row)
            except Exception as error:  # whatever it is, it is what was found
                failed = True
                write({"error": f"{type(error).__name__}: {error}"})
            faulthandler.cancel_dump_traceback_later()
            write({"end": name})
            if failed and not well():
                return
