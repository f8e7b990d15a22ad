"""Where a node comes from: the user's line, read from what Dynamo left in the node's metadata."""

from __future__ import annotations

import os
from functools import lru_cache

from torch import fx

from ..ir.graph import Origin


def origins_of(node: fx.Node, op: str) -> tuple[Origin, ...]:
    """The op and the user's innermost line ("model.py:12 in forward: x = self.norm(x)") of one node."""
    return (_origin(op, node.meta.get("stack_trace") or ""),)


@lru_cache(maxsize=4096)
def _origin(op: str, trace: str) -> Origin:
    return Origin(op, _last_frame(trace))


@lru_cache(maxsize=1024)
def _last_frame(trace: str) -> str:
    # Frames look as in a traceback: '  File "path", line 12, in forward' and the line of code below.
    start = trace.rfind('File "')
    if start < 0:
        return ""
    head, _, code = trace[start + 6 :].partition("\n")
    path, _, rest = head.partition('", line ')
    line, _, function = rest.partition(", in ")
    code = code.strip().partition("\n")[0].strip()
    place = f"{os.path.basename(path)}:{line}" + (f" in {function}" if function else "")
    return f"{place}: {code}" if code else place
