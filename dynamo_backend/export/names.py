"""What results are called: after the keys under which the program returns them."""

from __future__ import annotations

import re

from torch.utils import _pytree as pytree


def result_names(spec: pytree.TreeSpec) -> list[str]:
    """A name for each leaf: "logits", "cache_0"; "result" where nothing is named, "result_1" of a plain tuple."""
    leaves = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))[0]
    found: list[str] = []
    for path, _ in leaves:
        name = identifier(
            "_".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)
        )
        name = name if name.isidentifier() else f"result_{name}" if name else "result"
        while name in found:
            name += "_"
        found.append(name)
    return found


def identifier(text: str) -> str:
    """The text with nothing but letters, digits and underscores in it."""
    return re.sub(r"\W", "_", text, flags=re.ASCII)
