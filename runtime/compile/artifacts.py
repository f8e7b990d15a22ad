"""Entries of our cache among the artifacts of ``torch.compiler.save_cache_artifacts`` and ``load_cache_artifacts``.

What a process compiles or finds is noted with torch; loading puts it into the cache folder of the process that loads.
torch loads only kinds that it knows, which is what ``load_cache_artifacts`` of this module is for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from ..cache.cache import DiskCache
from ..cache.entry import DamagedEntry, Entry, decode_entry, encode_entry
from ..log import logger
from ..settings.options import Options

KIND = "mlc"


@CacheArtifactFactory.register
class MlcCacheArtifact(CacheArtifact):
    """One entry: the key is ``<kind>/<key>``, the content what its file holds."""

    def populate_cache(self) -> None:
        """Put the entry into the folder that the settings name here and now."""
        kind, _, key = self.key.partition("/")
        try:
            entry = decode_entry(self.content, kind, key)
        except DamagedEntry as error:
            logger(__name__).warning("a cache artifact %s %s; it is left out", self.key, error)
            return
        options = Options.resolve(None, None, os.environ)
        if options.cache:
            DiskCache(options.cache_dir).write(entry)

    @staticmethod
    def type() -> str:
        """The name of these artifacts among torch's."""
        return KIND


def note_artifact(entry: Entry) -> None:
    """Let ``save_cache_artifacts`` have an entry."""
    CacheArtifactManager.record_artifact(KIND, f"{entry.kind}/{entry.key}", encode_entry(entry))


def load_cache_artifacts(data: bytes) -> Any:
    """``torch.compiler.load_cache_artifacts``, with the entries of torch-mlc among them.

    ``data`` is the first of what ``torch.compiler.save_cache_artifacts`` returned, in this process or another, of the
    same versions. Entries go to the cache folder (MLC_CACHE_DIR). Returns torch's CacheInfo: its ``mlc_artifacts``
    are the keys; None where the data cannot be read.
    """
    return torch.compiler.load_cache_artifacts(data)
