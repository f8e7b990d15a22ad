"""What is wrong with a call that quantizes."""

from __future__ import annotations


class QuantizeError(ValueError):
    """What was asked cannot be quantized; the message says what, why not, and how to mend it."""
