"""A process that compiles GPU kernels: ``python -I triton_worker.py <parent> <seconds>``.

It is run as a file, by whoever has ``runtime/worker_pool.py``, and imports Triton and nothing else: not torch, nothing
of ours but the file beside it, and never the program that wants its kernels, so that a script needs no guard.

A message is a line of JSON that ends with the lengths of the runs of bytes behind it and a hash over them. Requests
come in through a socket that is standard input, and answers go out through it; what libraries print goes to standard
error, as their complaints do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO


def message_bytes(message: dict[str, Any], *parts: bytes) -> bytes:
    """A message as it goes over the wire."""
    head = {**message, "lengths": [len(p) for p in parts], "hash": hashlib.sha256(b"".join(parts)).hexdigest()}
    return b"".join((json.dumps(head).encode(), b"\n", *parts))


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
    """Take requests until the other end is closed, which ends the process, busy or not, and its assembler:
    they have a session of their own."""
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


class _Libraries:
    """Texts that stand in for libdevice, as files in memory, by their hash."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}

    def add(self, text: bytes) -> None:
        descriptor = os.memfd_create("torch-mlc-libdevice")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(text)
        self._files[hashlib.sha256(text).hexdigest()] = f"/proc/self/fd/{descriptor}"

    def file(self, digest: str | None) -> str | None:
        return None if digest is None else self._files[digest]


def _stages() -> Any:
    """The file beside this one, without the package around it."""
    name = "torch_mlc_triton_stages"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("triton_stages.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(parent: int, idle_seconds: float) -> None:
    out = socket.socket(fileno=os.dup(0))
    requests: queue.SimpleQueue[tuple[dict[str, Any], list[bytes]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), requests), daemon=True).start()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stages, libraries = _stages(), _Libraries()
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
        for text in parts:
            libraries.add(text)
        try:
            request = message["request"]
            request["library"] = libraries.file(request["library"])
            plain, binary = stages.answer_parts(stages.run_stages(stages.Request(**request)))
            answer: tuple[dict[str, Any], tuple[bytes, ...]] = {"answer": plain}, binary
        except Exception as error:  # whatever the compiler raises is for whoever asked
            answer = {"error": str(error), "kind": type(error).__name__}, ()
        try:
            out.sendall(message_bytes(answer[0], *answer[1]))
        except OSError:
            _end()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
