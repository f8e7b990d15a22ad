"""One entry of a cache as bytes: what was written is told from what was damaged, moved or made by others.

::

    torch-mlc cache 1\\n
    <sha256 of everything below, hex>\\n
    <JSON: kind, key, description, meta, size of the payload>\\n
    <payload bytes>

The hash catches damage; kind and key inside the text catch entries that were moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAGIC = b"torch-mlc cache 1\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """What an entry holds: ``meta`` is plain JSON, ``payload`` raw bytes."""

    kind: str
    key: str
    meta: Mapping[str, Any]
    payload: bytes = b""
    description: str = ""


class DamagedEntry(Exception):
    """Bytes are not what was written under a key; the text goes on after "entry …"."""


def encode_entry(entry: Entry) -> bytes:
    """The bytes of an entry."""
    header = {
        "kind": entry.kind, "key": entry.key, "description": entry.description, "payload": len(entry.payload),
        "meta": entry.meta,
    }  # fmt: skip
    body = json.dumps(header, separators=(",", ":")).encode() + b"\n" + entry.payload
    return b"".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), b"\n", body))


def decode_entry(data: bytes, kind: str, key: str | None = None) -> Entry:
    """The entry that bytes hold. Raises DamagedEntry where they are not one of that kind and key, or of any key."""
    start = len(_MAGIC)
    if data[:start] != _MAGIC or data[start + 64 : start + 65] != b"\n":
        raise DamagedEntry("was not written by torch-mlc, or by another version of it")
    body = data[start + 65 :]
    if hashlib.sha256(body).hexdigest().encode() != data[start : start + 64]:
        raise DamagedEntry("is damaged (its hash does not fit)")
    line, _, payload = body.partition(b"\n")
    try:
        header = json.loads(line)
        found = Entry(header["kind"], header["key"], header["meta"], payload, header["description"])
        size = header["payload"]
    except (ValueError, KeyError, TypeError):
        raise DamagedEntry("was not written by torch-mlc, or by another version of it") from None
    if (found.kind, len(payload)) != (kind, size) or key not in (None, found.key):
        raise DamagedEntry("belongs to another key")
    return found
