"""A model runs, and afterwards everything is as it was: tensors, random numbers, and what Dynamo has compiled of it."""

from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, pgo
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.utils import graph_break_reasons
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...runtime.log import MlcWarning

# No number of explanations is too many.
_NO_LIMIT = 1 << 30


class KeptTensors:
    """Memory that is put back as it was when ``keep`` was called: whole storages, whatever tensors see of them.

    Versions of the tensors are put back too, so that autograd takes none of them for written.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions = ExitStack()

    def keep(self, tensors: Iterable[Any]) -> None:
        """Copy what the tensors among ``tensors`` have; fakes, and what has no memory of its own, are passed over."""
        for tensor in (part for t in tensors if isinstance(t, torch.Tensor) for part in _plain(t)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._kept:
                self._kept[storage._cdata] = storage, storage.clone()
            if not tensor.is_inference():
                self._versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor's memory is put back."""
        return all(part.untyped_storage()._cdata in self._kept for part in _plain(tensor))

    def restore(self) -> None:
        """Write back what has changed; memory that nobody wrote to, which may be read-only, is not written."""
        for storage, before in self._kept.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            if not torch.equal(_bytes(storage), _bytes(before)):
                storage.copy_(before)
        self._versions.close()


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor is made of."""
    if isinstance(tensor, FakeTensor) or isinstance(getattr(tensor, "data", None), FakeTensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _plain(getattr(tensor, name))]
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    return [tensor]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def tensors_as_they_were(model: Any, arguments: Iterable[Any]) -> Iterator[KeptTensors]:
    """Buffers of a model (or of the module whose method it is) and arguments are as they were afterwards, and whatever
    else the block keeps."""
    kept = KeptTensors()
    owner = getattr(model, "__self__", model)
    module = owner if isinstance(owner, torch.nn.Module) else None
    kept.keep((*arguments, *(module.buffers() if module is not None else ())))
    parameters = [(n, p) for n, p in module.named_parameters() if not p.is_inference()] if module is not None else []
    versions = [p._version for _, p in parameters]
    try:
        yield kept
    finally:
        written = [n for (n, p), v in zip(parameters, versions) if p._version != v and not kept.holds(p)]
        kept.restore()
        if written:
            warnings.warn(
                MlcWarning(
                    f"torch_mlc.explain ran the model, and its code outside of compiled graphs wrote to "
                    f"{', '.join(written)}: these parameters are changed. Explain a copy of the model to keep them"
                ),
                stacklevel=4,
            )


@contextmanager
def random_state_as_it_was() -> Iterator[None]:
    """The generators of the CPU, of every GPU, of Python and of NumPy go on afterwards as if nothing had been drawn."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def dynamo_as_it_was() -> Iterator[list[Any]]:
    """What Dynamo compiles in the block is forgotten afterwards, and all that it had compiled before is still there.

    Gives the list of graph breaks (torch's ``GraphCompileReason``) that the block has met, once it is over. Sizes that
    vary are those that this process has seen so far, as for any other compilation; what the block sees is not noted.
    """
    made: dict[types.CodeType, list[types.CodeType]] = {}
    hook = convert_frame.register_bytecode_hook(lambda code, new: made.setdefault(code, []).append(new))
    counts, known, breaks = dict(convert_frame.FRAME_COMPILE_COUNTER), len(graph_break_reasons), list[Any]()
    sizes: Any = pgo._CODE_STATE
    pgo._CODE_STATE = copy.deepcopy(sizes)
    # Entries of the same code count toward a limit, above which it would not be compiled here.
    settings = dynamo_config.patch(
        recompile_limit=_NO_LIMIT,
        accumulated_recompile_limit=_NO_LIMIT,
        error_on_recompile=False,
        automatic_dynamic_local_pgo=False,
        automatic_dynamic_remote_pgo=False,
    )
    try:
        with settings:
            yield breaks
    finally:
        hook.remove()
        pgo._CODE_STATE = sizes
        breaks += graph_break_reasons[known:]
        del graph_break_reasons[known:]
        for code, new in made.items():
            _forget(code, new)
        convert_frame.FRAME_COMPILE_COUNTER.clear()
        convert_frame.FRAME_COMPILE_COUNTER.update(counts)


def _forget(code: types.CodeType, made: list[types.CodeType]) -> None:
    """Remove the entries of ``code`` that run one of ``made``, and no other."""
    entries = eval_frame._debug_get_cache_entry_list(code)
    ours = [e for e in entries if any(e.code is new for new in made)]
    if len(ours) == len(entries) and not eval_frame._debug_get_precompile_entries(code):
        eval_frame.reset_code(code)
        return
    for entry in ours:
        # As torch does where an object dies that the entry was for.
        CheckFunctionManager.invalidate(SimpleNamespace(guard_manager=entry.guard_manager), "its explanation")
