"""What torch's own backends are known to get wrong in the conformance cases, and why."""

from __future__ import annotations

IGNORES = "it takes any option, with a warning"

KNOWN: dict[str, dict[str, str]] = {
    "eager": {"options::unknown_option": IGNORES, "options::unknown_mode": IGNORES},
    "aot_eager": {
        "options::unknown_option": IGNORES,
        "options::unknown_mode": IGNORES,
        "mutation::written_after_it_was_read": "its backward reads the input anew, after it was written",
        "subclasses::logging_subclass": "a check of torch's own, which it turns on, refuses subclasses",
    },
}
