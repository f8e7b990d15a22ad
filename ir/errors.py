"""The root of every error that this project raises on purpose."""

from __future__ import annotations


class MlcError(Exception):
    """Base class: catching it catches everything torch-mlc raises on purpose."""


class OutOfRangeError(MlcError, IndexError, RuntimeError):
    """Data name a place that a tensor does not have. Eager raises IndexError or RuntimeError, as the op would have it:
    this is both."""


class DivisionByZeroError(MlcError, ZeroDivisionError, RuntimeError):
    """Integers are divided by zero, on a CPU. Eager raises RuntimeError; this is one."""


class FreedInputError(MlcError, RuntimeError):
    """A program was given a tensor whose memory was freed, or a part of it, or that never had any. Eager reads beyond
    what was freed and may die."""


class IRError(MlcError):
    """An IR object was built with parts that do not fit together."""


class VerifyError(IRError):
    """The verifier found IR that breaks a rule; the text shows the IR with the culprit underlined."""


class MemoryLimitError(MlcError, RuntimeError):
    """A graph would hold more memory than ``options={"memory_limit": …}`` allows; the text says how much, and what."""
