"""What torch's own backends are known to get wrong in the conformance cases, and why."""

from __future__ import annotations

IGNORES = "it takes any option, with a warning"
MINIFIER = "the minifier asks what was compiled for parameters, which a function has none of"

KNOWN: dict[str, dict[str, str]] = {
    "eager": {
        "options::unknown_option": IGNORES,
        "options::unknown_mode": IGNORES,
        "failures::minifier_looks_on": MINIFIER,
        "control_flow::gradients_of_repeated_region": "torch's own gradient of a region is for compilers alone",
    },
    "aot_eager": {
        "options::unknown_option": IGNORES,
        "options::unknown_mode": IGNORES,
        "failures::minifier_looks_on": MINIFIER,
        "mutation::written_after_it_was_read": "its backward reads the input anew, after it was written",
        "subclasses::logging_subclass": "a check of torch's own, which it turns on, refuses subclasses",
    },
    "inductor": {
        "mutation::swapped_inputs": "both inputs end as one",
        "mutation::written_after_it_was_read": "its backward reads the input anew, after it was written",
        "numbers::nan_goes_through": "x * 0 is 0, whatever x is",
        "numbers::infinities": "x * 0 is 0, whatever x is",
        "complex_numbers::negative_input": "reads the memory of a negative view as it stands",
        "autograd::forward_mode": "gives no derivative in forward mode, and no error",
        "threads::forked_child_compiles": "waits for a compiling thread of the parent, which the child does not have",
        "failures::minifier_looks_on": MINIFIER,
        "settings::deterministic_fill": "leaves new memory as it is",
    },
}
