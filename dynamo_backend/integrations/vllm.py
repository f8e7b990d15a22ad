"""The compiler of vLLM's piecewise graphs: ``MlcCompiler`` speaks the protocol of its ``CompilerInterface``.

vLLM is not imported, and needs not be installed: the protocol asks for methods alone. It is that of vLLM 0.12 and
later, which compiles for a range of token counts (``compile_range``) and names artifacts (``key``); the older form, for
one count or for all (``runtime_shape``), is understood too. A platform plug-in of vLLM gives the class by the name
``torch_mlc.dynamo_backend.integrations.vllm.MlcCompiler`` from ``get_compile_backend``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ...ir.errors import MlcError
from ...runtime.cache.fingerprint import environment_fingerprint
from ..entry.backend import mlc_backend, settings_of

FOLDER = "mlc_cache"
# What a handle begins with, so that another compiler's is told.
_HANDLE = "mlc:"


class HandleError(MlcError):
    """A handle from which nothing can be loaded; vLLM's cache folder is to be removed then."""


class MlcCompiler:
    """Compiles graphs by this backend, and keeps what it makes below vLLM's cache folder."""

    name = "mlc"

    def __init__(self) -> None:
        self._folder: Path | None = None

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Keep everything in a folder below ``cache_dir``, which may be copied to another machine; with
        ``disable_cache`` nothing is kept. Models with another ``prefix`` share what is equal."""
        self._folder = None if disable_cache else Path(cache_dir) / FOLDER
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def compute_hash(self, vllm_config: object) -> str:
        """What this compiler's results depend on beside the configuration: its source, torch, and its settings."""
        told = environment_fingerprint() + settings_of(None, None).fingerprint()
        return hashlib.sha256(told.encode()).hexdigest()[:10]

    def compile(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], compiler_config: Mapping[str, Any] | None,
        compile_range: object = None, key: str | None = None, *, runtime_shape: int | None = None,
    ) -> tuple[Callable[..., Any], str | None]:  # fmt: skip
        """A function of the graph's inputs that returns what the graph does, and a handle to load it by; None for the
        handle where nothing is kept.

        ``compiler_config`` may hold options of ``torch.compile(options=…)`` under "mlc"; the rest is Inductor's, which
        vLLM gives all compilers. ``compile_range`` tells for which numbers of tokens the function will be called. Sizes
        that vary are symbols of ``example_inputs``, so that it changes nothing here.
        """
        asked = (compiler_config or {}).get("mlc") or {}
        compiled = self._compiled(graph, example_inputs, asked)
        told = runtime_shape if compile_range is None else compile_range
        if self._folder is None:
            return compiled, None
        return compiled, f"{_HANDLE}{key or told}:{json.dumps(dict(asked), sort_keys=True)}"

    def load(
        self, handle: object, graph: fx.GraphModule, example_inputs: Sequence[Any], graph_index: int,
        compile_range: object = None, *, runtime_shape: int | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """The function of a handle. The folder is searched by what the graph is, so that a handle that belongs to
        another graph can give no wrong one.

        Raises: HandleError for a handle that another compiler has given, or without a folder.
        """
        if not isinstance(handle, str) or not handle.startswith(_HANDLE) or ":{" not in handle:
            raise HandleError(f"{handle!r} is no handle of the compiler mlc; remove vLLM's cache folder, and try again")
        if self._folder is None or not self._folder.is_dir():
            raise HandleError(
                f"graph {graph_index}: there is no folder of compiled graphs ({self._folder}); initialize_cache has to "
                "be called with the folder that the handle comes from"
            )
        return self._compiled(graph, example_inputs, json.loads(handle[handle.index(":{") + 1 :]))

    def _compiled(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], asked: Mapping[str, object]
    ) -> Callable[..., Any]:
        options = dict(asked)
        if self._folder is None:
            options["cache"] = False
        else:
            options["cache_dir"] = str(self._folder)
        own = copy.deepcopy(graph)
        single = _returns_one(own)
        run = mlc_backend(own, list(example_inputs), options=options)
        return (lambda *args: run(*args)[0]) if single else run


def _returns_one(graph: fx.GraphModule) -> bool:
    """Whether a graph returns a tensor rather than a tuple of them, as parts of a split graph do; then it is made to
    return a tuple."""
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    if isinstance(output.args[0], tuple | list):
        return False
    output.args = ((output.args[0],),)
    graph.recompile()
    return True
