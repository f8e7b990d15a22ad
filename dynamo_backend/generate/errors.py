"""What can be wrong with a request to generate text."""

from __future__ import annotations

from ...ir.errors import MlcError


class GenerateError(MlcError):
    """A model, a prompt or a setting that cannot be used; the message says why, and how to mend it."""
