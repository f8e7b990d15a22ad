"""Variables of the environment that are settings, misspelt ones, and those that belong to somebody else.

Every setting is read from `TORCH_MLC_<NAME>` and, where that is not set, from `MLC_<NAME>`. Other projects have
variables that begin with `MLC_` too (`MLC_LLM_HOME`): those are left alone, but for near misses of ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "MLC_"
STRICT_PREFIX = "TORCH_MLC_"
# Words of at least this many letters may have two mistakes.
_LONG_WORD = 8
# In names of so few letters another letter makes another word: only one too many, one missing or two turned count.
_SHORT_NAME = 3


@dataclass(frozen=True, slots=True)
class Given:
    """A setting that the environment has: the variable, under its very name, and its text."""

    variable: str
    text: str


@dataclass(frozen=True, slots=True)
class Environment:
    """What an environment says. ``given`` is by ``MLC_*`` name, ``wrong`` are names to be refused, each with the right
    one that is meant ("" for none), and ``foreign`` those that are left alone."""

    given: Mapping[str, Given]
    wrong: Mapping[str, str]
    foreign: tuple[str, ...]


def read_environment(environ: Mapping[str, str], known: Iterable[str]) -> Environment:
    """What ``environ`` has of the settings with the ``known`` names (`MLC_TUNE`, …). Empty text is as if not set."""
    names = tuple(known)
    given: dict[str, Given] = {}
    wrong: dict[str, str] = {}
    foreign = []
    for variable in sorted(environ):
        strict = variable.startswith(STRICT_PREFIX)
        if not strict and not variable.startswith(PREFIX):
            continue
        plain = variable.removeprefix("TORCH_")
        if plain in names:
            # In the order of the alphabet TORCH_MLC_* comes last, and so goes over MLC_*.
            if environ[variable].strip():
                given[plain] = Given(variable, environ[variable])
            continue
        near = near_name(plain, names)
        if strict:
            wrong[variable] = near and "TORCH_" + near
        elif near:
            wrong[variable] = near
        else:
            foreign.append(variable)
    return Environment(given, wrong, tuple(foreign))


def near_name(variable: str, known: Iterable[str]) -> str:
    """The setting that ``variable`` is a misspelling of: `MLC_TUNNE`, `MLC_CACHEDIR`, `MLC_DIR_CACHE`; "" for none.

    The letters differ by one mistake where underscores do not count, or each of as many words by one (two in long
    words), in any order. A word that is another (`MLC_TEMP_DIR` for `MLC_DUMP_DIR`), one too many or too few is none:
    such names are as likely to be somebody else's.
    """
    asked = _words(variable)
    found = [(mistakes, name) for name in known if (mistakes := _mistakes(asked, _words(name))) is not None]
    return min(found)[1] if found else ""


def _words(variable: str) -> list[str]:
    return [word for word in variable.removeprefix(PREFIX).upper().split("_") if word]


def _mistakes(asked: list[str], ours: list[str]) -> int | None:
    """How many mistakes make ``asked`` of a name of ours; None where it is another name."""
    whole = _typos("".join(asked), "".join(ours), 1)
    if whole is not None or len(asked) != len(ours):
        return whole
    left = list(ours)
    total = 0
    for word in asked:
        typos = [
            (n, other) for other in left if (n := _typos(word, other, 2 if len(other) >= _LONG_WORD else 1)) is not None
        ]
        if not typos:
            return None
        count, taken = min(typos)
        left.remove(taken)
        total += count
    return total


def _typos(asked: str, ours: str, most: int) -> int | None:
    """Letters that are wrong, too many, missing or turned; None for more than ``most``."""
    count = edit_distance(asked, ours)
    if len(ours) <= _SHORT_NAME and len(asked) == len(ours) and sorted(asked) != sorted(ours):
        return None
    return count if count <= most else None


def edit_distance(a: str, b: str) -> int:
    """Letters to change, add, leave out, or turn with the next one (Damerau's distance, each letter moved once)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
