"""A program under test as data: lines of Python over named tensors, and its text for those who want to run it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

Sizes: TypeAlias = "dict[str, int]"
# Words of lines that draw random numbers.
DRAW = re.compile("rand|drop|drawn|coins|multinomial|poisson|bernoulli")

_SNIPPET = '''"""{title}

Run it from the root of the repository.
"""
{machine}
import torch
import torch.nn.functional as F
from tests.fuzz.values import namespace

globals().update(namespace(compiled=True))

{function}

{inputs}

compiled = torch.compile(fn, backend="mlc", dynamic={dynamic}, options={options})
for sizes in {sizes}:
    expected, actual = inputs(**sizes), inputs(**sizes)
    torch.manual_seed(0)
    print("eager:", {call}(*expected))
    torch.manual_seed(0)
    print("mlc:  ", {call.compiled}(*actual))  # of {rounds} rounds, see turn() in run.py
'''


@dataclass(frozen=True, slots=True)
class Input:
    """An argument. ``text`` makes it from the sizes, the inputs before it and the functions of ``values.py``."""

    name: str
    text: str
    grad: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One line. ``kind``: ``compute`` makes tensors of its own, ``view`` may share memory with its first operand,
    ``write`` changes its first operand, and may make something as well. ``eps`` is the relative rounding of the types
    it computes in; where it is ``exact`` nothing is rounded before it or in it.
    """

    text: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    kind: Literal["compute", "view", "write"] = "compute"
    eps: float = 0.0
    exact: bool = False

    @property
    def line(self) -> str:
        """The statement."""
        return f"{', '.join(self.results)} = {self.text}" if self.results else self.text


@dataclass(frozen=True, slots=True)
class Program:
    """``sizes``: what the size names of the inputs' texts are, call by call. ``dynamic`` is torch.compile's."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    returns: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    dynamic: bool | None = False
    gradient: bool = False
    # Whether sizes and numbers that depend on data stay in the graph (Dynamo's capture_* settings).
    capture: bool = False
    # Calls with the same arguments, of which what may change is turned round in between.
    rounds: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """How it is compiled."""
        return {
            "dynamic": self.dynamic,
            "gradient": self.gradient,
            "rounds": self.rounds,
            "options": dict(self.options),
        }

    def record(self) -> dict[str, Any]:
        """The program as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Program:
        """The inverse of ``record``."""
        steps = tuple(
            Step(**{**s, "results": tuple(s["results"]), "operands": tuple(s["operands"])}) for s in record["steps"]
        )
        inputs = tuple(Input(**i) for i in record["inputs"])
        made = {"inputs": inputs, "steps": steps, "returns": tuple(record["returns"]), "sizes": tuple(record["sizes"])}
        return cls(**{**record, **made})

    # --- text ---------------------------------------------------------------------------------------------------------

    def function(self) -> str:
        """The definition of ``fn``."""
        body = [*(s.line for s in self.steps), f"return ({''.join(f'{r}, ' for r in self.returns)})"]
        return f"def fn({', '.join(i.name for i in self.inputs)}):\n" + "".join(f"    {line}\n" for line in body)

    def makes_inputs(self) -> str:
        """The definition of ``inputs``."""
        lines = [f"{i.name} = {i.text}{'.requires_grad_()' if i.grad and self.gradient else ''}" for i in self.inputs]
        names = "".join(f"{i.name}, " for i in self.inputs)
        body = [*lines, f"return ({names})"]
        return f"def inputs({', '.join(self.sizes[0])}):\n" + "".join(f"    {line}\n" for line in body)

    def snippet(self, title: str) -> str:
        """A script that runs the program by eager and compiled."""
        text = _SNIPPET
        for call, inner in (("{call}", "fn"), ("{call.compiled}", "compiled")):
            run = inner if self.gradient else f"torch.no_grad()({inner})"
            text = text.replace(call, run)
        values = {
            "{title}": title.replace('"""', "'''"), "{function}": self.function(), "{inputs}": self.makes_inputs(),
            "{dynamic}": repr(self.dynamic), "{options}": repr({"fallback_random": True, **self.options}),
            "{sizes}": repr(list(self.sizes)), "{rounds}": str(self.rounds),
            "{machine}": _INTERPRETED if "target" in self.options else "",
        }  # fmt: skip
        for name, value in values.items():
            text = text.replace(name, value)
        if self.gradient:
            text += _BACKWARD
        return text


# Before torch's own modules, of which some import Triton.
_INTERPRETED = """
from tests.fuzz.interpreted import interpreted

machine = interpreted()
machine.__enter__()
"""

_BACKWARD = """    for fn_, made in ((fn, expected), (compiled, actual)):
        torch.manual_seed(0)
        ends = [t for t in fn_(*made) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        weights = [numbers(t.shape, t.dtype, k) for k, t in enumerate(ends)]
        print("gradients:", torch.autograd.grad(ends, leaves, weights, allow_unused=True))
"""


def on_target(program: Program, target: str) -> Program:
    """The program, compiled for a GPU that is not here, with those of its settings that are not the CPU's."""
    kept = {k: v for k, v in program.options.items() if k in ("numerics", "loss_chunk", "verify")}
    return replace(program, options={**kept, "target": target, "cache": False, "host_program": "python"})


def renamed(text: str, old: str, new: str) -> str:
    """A line with another name in the place of one."""
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def mentioned(text: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that a text refers to."""
    found = set(re.findall(r"\b[a-z]\d+\b", text))
    return tuple(n for n in names if n in found)
