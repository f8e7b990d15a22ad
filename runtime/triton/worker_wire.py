"""How a process that works for another is spoken to, and when it ends.

A message is a line of JSON that ends with the lengths of the runs of bytes behind it and a hash over them. Requests
come in through a socket that is standard input, and answers go out through it; what libraries print goes to standard
error, as their complaints do. Nothing of ours is imported: workers run this file as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

# What is made of a request and its runs of bytes.
Answering = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], Sequence[bytes]]]


def message_bytes(message: dict[str, Any], *parts: bytes) -> bytes:
    """A message as it goes over the wire."""
    head = {**message, "lengths": [len(p) for p in parts], "hash": hashlib.sha256(b"".join(parts)).hexdigest()}
    return b"".join((json.dumps(head).encode(), b"\n", *parts))


def serve(parent: int, idle_seconds: float, answer: Answering) -> None:
    """Answer requests one after the other, and never return: the process ends with whoever asks, when its parent is
    another one, and when nobody has asked for so long. What ``answer`` raises is told as ``error``."""
    out = socket.socket(fileno=os.dup(0))
    requests: queue.SimpleQueue[tuple[dict[str, Any], list[bytes]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), requests), daemon=True).start()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while True:
        try:
            message, parts = requests.get(timeout=idle_seconds)
        except queue.Empty:
            os._exit(0)
        if "path" in message:
            sys.path[:] = message["path"]
        if "environment" in message:
            os.environ.clear()
            os.environ.update(message["environment"])
        try:
            made = answer(message["request"], parts)
        except Exception as error:  # whatever it is, it is for whoever asked
            made = {"error": str(error), "kind": type(error).__name__}, ()
        try:
            out.sendall(message_bytes(made[0], *made[1]))
        except OSError:
            _end()


def _read_message(file: BinaryIO) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next message; None at the end, and where a message breaks off."""
    line = file.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    parts = [file.read(n) for n in message["lengths"]]
    if hashlib.sha256(b"".join(parts)).hexdigest() != message["hash"]:
        return None
    return message, parts


def _receive(file: BinaryIO, requests: queue.SimpleQueue[tuple[dict[str, Any], list[bytes]]]) -> None:
    """Take requests until the other end is closed, which ends the process, busy or not, and what it runs: they have a
    session of their own."""
    while (found := _read_message(file)) is not None:
        requests.put(found)
    _end()


def _end() -> None:
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _follow(parent: int) -> None:
    """End when the parent has ended: a fork of it may hold the socket open for longer."""
    wait = threading.Event()
    while os.getppid() == parent:
        wait.wait(1.0)
    _end()
