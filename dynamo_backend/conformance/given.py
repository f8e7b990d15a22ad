"""Options of a backend as they are given on a command line."""

from __future__ import annotations

import json
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """The object that a text is as JSON. Raises ValueError with what the text is instead."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is no object, such as {{"strict": 1}}')
    return value
