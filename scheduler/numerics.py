"""Which places of a model keep eager's numerics, where all others go by fast ones.

A place is what one operation of the model became: ATen's op, the line of the model, and the path of its module. It is
named by a key that no number decides, of a line or a layer: equal places of layers that repeat have one key, and an
edit elsewhere leaves it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from ..ir.errors import MlcError
from ..ir.function.function import Stage
from ..ir.graph.graph import Node
from .decisions.keys import text_key

FAST, EAGER = "fast", "eager"
# What may be kept of a place: the exact functions of float32, eager's conversions to half types, eager's own op.
FUNCTION, ROUNDING, OP = "function", "rounding", "op"
KEPT = (FUNCTION, ROUNDING, OP)
# Passes that change roundings, each of which may be left out.
REWRITE = "rewrite"
# Those that eager's numerics leave out as a whole …
FAST_REWRITES = (
    "unshift_softmax", "write_sinks", "unite_softmax", "renormalize", "recompute_scores", "merge_products",
    "fold_batch_norms", "fold_scales", "pack_weights", "pack_convolutions", "begin_scatters", "collapse_one_hot",
    "rewrite_attention", "rewrite_logsumexp",
)  # fmt: skip
# … and those that it does not, or not all of.
OTHER_REWRITES = ("chunk_losses", "decompose_log_softmax", "join_products", "substitute", "multiply_by_onednn")
REWRITES = (*FAST_REWRITES, *OTHER_REWRITES)
# Those over ATen graphs, which put other nodes in the place of what an entry for an op would name.
ATEN_REWRITES = (*FAST_REWRITES[:10], *OTHER_REWRITES[:3])
KINDS = (REWRITE, *KEPT)

_KEY = re.compile(r"([a-z]+):([^@]+)(?:@(.*))?")
_LINE = re.compile(r"[^\s:]+\.\w+:\d+")
_DIGITS = re.compile(r"(?<![^.])\d+(?![^.])")


class NumericsError(MlcError, ValueError):
    """An entry of numerics by place that names nothing; the message has the nearest name that there is."""


@dataclass(frozen=True, slots=True)
class NumericsPlace:
    """Where in the model something is computed: the op of ATen ("aten.gelu.default"), the line ("net.py:12 in forward:
    x = gelu(x)"), and the path of the innermost module ("h.0.mlp"), "" where that is not known, as in a backward."""

    op: str
    line: str = ""
    path: str = ""
    backward: bool = False
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        code = self.line.partition(" in ")[2] or self.line
        told = (self.op, code, self.module, "backward" if self.backward else "forward")
        object.__setattr__(self, "key", text_key(told))

    @property
    def module(self) -> str:
        """The path without the numbers of layers ("h.*.mlp")."""
        return _DIGITS.sub("*", self.path)

    @property
    def at(self) -> str:
        """The file and number of the line ("net.py:12"), "" where it is not known."""
        return self.line.partition(" in ")[0].partition(": ")[0]

    def name(self, kind: str, layer: bool = False) -> str:
        """``kind:key``, as an entry names it; of one ``layer`` with its path behind an @."""
        return f"{kind}:{self.key}{f'@{self.path}' if layer and self.path else ''}"

    @property
    def names(self) -> tuple[str, ...]:
        """What names it beside its keys, the nearest first: its line, and the op with its overload, without, and
        alone."""
        words = self.op.split(".")
        return tuple(dict.fromkeys(n for n in (self.at, self.op, ".".join(words[:2]), words[1 % len(words)]) if n))

    def __str__(self) -> str:
        return f"{self.op}{' (backward)' if self.backward else ''} at {self.line or 'no line of the model'}"


@dataclass(frozen=True, slots=True)
class NumericsByPlace:
    """Entries of numerics, sorted: (name, "eager" or "fast"), and what holds where none does. ``whole``: all places of
    the graph at hand keep eager's, so that it is compiled as ``numerics="eager"`` is."""

    items: tuple[tuple[str, str], ...]
    default: str = FAST
    whole: bool = False
    _by_name: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", dict(self.items))

    def kept(self, place: NumericsPlace) -> tuple[str, ...]:
        """What is kept of a place, of ``KEPT``."""
        return tuple(kind for kind in KEPT if self._value(kind, place) == EAGER)

    def entry(self, kind: str, place: NumericsPlace) -> str | None:
        """The name of the entry that decides about a kind at a place: that of the layer before that of the place, of
        the line, and of the op, which say nothing of eager's own op."""
        for name in (place.name(kind, layer=True), place.name(kind)):
            if name in self._by_name:
                return name
        if kind == OP:
            return None
        return next((n for n in place.names if n in self._by_name), None)

    def _value(self, kind: str, place: NumericsPlace) -> str:
        name = self.entry(kind, place)
        if name is not None:
            return self._by_name[name]
        return FAST if kind == OP else self.default

    @property
    def left_out(self) -> frozenset[str]:
        """The passes that are not to run. Rewrites of ATen graphs take the nodes away that an entry for an op names."""
        names = {n for n in FAST_REWRITES if self.default == EAGER}
        names |= {n.partition(":")[2] for n, v in self.items if n.startswith(f"{REWRITE}:") and v == EAGER}
        names -= {n.partition(":")[2] for n, v in self.items if n.startswith(f"{REWRITE}:") and v == FAST}
        return frozenset((*names, *(ATEN_REWRITES if self.has_ops else ())))

    @property
    def has_ops(self) -> bool:
        """Whether any entry asks for eager's own op."""
        return any(n.startswith(f"{OP}:") and v == EAGER for n, v in self.items)

    def unused(self, places: Iterable[NumericsPlace]) -> tuple[str, ...]:
        """Entries that are for none of some places; passes are for every graph."""
        places = tuple(places)
        used = {self.entry(kind, p) for p in places for kind in KEPT}
        used |= {n for p in places for n in p.names}
        return tuple(n for n, _ in self.items if n not in used and not n.startswith(f"{REWRITE}:"))

    def plain(self) -> dict[str, str]:
        """As ``parse_places`` takes it."""
        return {"default": self.default, **dict(self.items)}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.plain().items())


Numerics = str | NumericsByPlace


def is_fast(numerics: Numerics) -> bool:
    """Whether float32 may be kept between fused operations anywhere."""
    return not numerics.whole if isinstance(numerics, NumericsByPlace) else numerics != EAGER


def rounds_as_eager(numerics: Numerics) -> bool:
    """Whether eager's numerics hold where no place is named."""
    return numerics == EAGER or (isinstance(numerics, NumericsByPlace) and numerics.default == EAGER)


def keeps(node: Node | Stage, kind: str) -> bool:
    """Whether a node, or what a function has of one, keeps something of eager's numerics."""
    return any(kind in o.keeps for o in getattr(node, "origins", ()))


def passes_left_out(numerics: Numerics) -> frozenset[str]:
    """The passes that are not to run."""
    return numerics.left_out if isinstance(numerics, NumericsByPlace) else frozenset()


def parse_places(given: Mapping[str, str]) -> NumericsByPlace:
    """Numerics of a mapping from names to "eager" or "fast". Names are ``kind:key`` (with ``@path`` for one layer),
    ``rewrite:pass``, "file.py:12", or that of an op; "default" is what else holds.

    Raises NumericsError for a value or a form of name that there is not.
    """
    items = {str(name).strip(): value for name, value in given.items()}
    for name, value in items.items():
        if value not in (FAST, EAGER):
            raise NumericsError(f"{name!r}: {value!r} is neither 'fast' nor 'eager'{_near(str(value), (FAST, EAGER))}")
        if name != "default":
            _check_name(name)
    default = items.pop("default", FAST)
    return NumericsByPlace(tuple(sorted(items.items())), default)


def nearest(name: str, places: Iterable[NumericsPlace]) -> str:
    """ " Did you mean …?" of the place with the most similar name, "" where none is near."""
    known: dict[str, NumericsPlace] = {}
    for place in places:
        for told in (*place.names, *(place.name(k) for k in KEPT)):
            known.setdefault(told, place)
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r} ({known[found[0]]})?" if found else ""


def _check_name(name: str) -> None:
    if _LINE.fullmatch(name):
        return
    found = _KEY.fullmatch(name)
    if found is None:
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+){0,2}", name):
            return
        raise NumericsError(
            f"{name!r} names no place: give kind:key as torch_mlc.attribute has it, a line (net.py:12), or an op "
            "(aten.gelu)"
        )
    kind, key = found[1], found[2]
    if kind not in KINDS:
        raise NumericsError(f"{name!r}: there is no kind {kind!r} of {', '.join(KINDS)}.{_near(kind, KINDS)}")
    if kind == REWRITE and key not in REWRITES:
        raise NumericsError(f"{name!r}: no pass that changes roundings is called {key!r}.{_near(key, REWRITES)}")
    if kind != REWRITE and not re.fullmatch(r"[0-9a-f]{16}", key):
        raise NumericsError(f"{name!r}: the key of a place has 16 hex digits, as torch_mlc.attribute prints it")


def _near(word: str, known: Iterable[str]) -> str:
    found = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""
