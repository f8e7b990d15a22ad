"""The root of every error that this project raises on purpose."""

from __future__ import annotations


class MlcError(Exception):
    """Base class: catching it catches everything torch-mlc raises on purpose."""


class IRError(MlcError):
    """An IR object was built with parts that do not fit together."""


class VerifyError(IRError):
    """The verifier found IR that breaks a rule; the text shows the IR with the culprit underlined."""
