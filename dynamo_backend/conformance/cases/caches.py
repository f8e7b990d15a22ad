"""What may be used again, and what has to be compiled anew."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler._cache import CacheArtifactManager

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import NotApplicable, expect
from ..kit.processes import anew
from ..kit.subject import Make, Subject


class Scaled(nn.Module):
    """Scales by a number that is no parameter."""

    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.weight


def is_(mine: Tensor, wanted: Tensor, what: str, loose: float = 1.0) -> None:
    told = unequal(mine, wanted, loose)
    expect(not told, f"{what} {told}")


@case("torch._dynamo.reset() leaves something behind.", "Tests and notebooks begin anew with it.")
def reset(subject: Subject) -> None:
    x = torch.randn(4, 4)
    for _ in range(3):
        compiled = subject.compile(lambda t: t.sin() + 1, fullgraph=True)
        is_(compiled(x), x.sin() + 1, "the result after a reset")
        torch._dynamo.reset()


@case("Programs that differ in a number alone are taken for one.", "A cache's key lacks constants.")
def look_alikes(subject: Subject) -> None:
    x = torch.randn(5)
    for number in (2.0, -0.0, float("nan"), 2.0):
        compiled = subject.compile(lambda t, number=number: t * number, fullgraph=True)
        is_(compiled(x), x * number, f"x * {number}")


@case("Modules of one class are taken for one.", "Layers of a model differ in attributes and weights alone.")
def modules_of_one_class(subject: Subject) -> None:
    x = torch.randn(3)
    nets = [Scaled(2.0), Scaled(5.0), Scaled(2.0)]
    with torch.no_grad():
        nets[2].weight.fill_(7)
    for net in [*nets, *nets]:
        is_(subject.compile(net)(x), net(x), f"the module that scales by {net.by}")


@case("A program of one type is used for another.", "Half inputs are read as float32.")
def types_change(subject: Subject) -> None:
    def make(dtype: torch.dtype) -> Make:
        return lambda: ((torch.randn(6) * 5).to(dtype),)

    kinds = (torch.float32, torch.bfloat16, torch.int32, torch.float16, torch.float32)
    subject.agrees(lambda x: x * 2 + 1, *(make(d) for d in kinds))


@case("Values of parameters are built into the program.", "Training goes on with the first weights.")
def parameters_change(subject: Subject) -> None:
    net = nn.Linear(3, 3)
    compiled, x = subject.compile(net), torch.randn(2, 3)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            for _ in range(3):
                is_(compiled(x), net(x), "the result after parameters changed")
                with torch.no_grad():
                    net.weight.add_(1)
                net.load_state_dict({name: v * 0.5 for name, v in net.state_dict().items()})
        net.weight = nn.Parameter(torch.randn(3, 3))


@case("A tensor beside the arguments is read as it was.", "Globals and closures are inputs too.")
def closures_change(subject: Subject) -> None:
    table = torch.ones(4)
    compiled, x = subject.compile(lambda t: t * table, fullgraph=True), torch.randn(4)
    for _ in range(3):
        is_(compiled(x), x * table, "the result after a tensor of the closure was written")
        table.add_(2)


@case("An attribute of a module is that of the first call.", "Schedules change numbers of modules.")
def attributes_change(subject: Subject) -> None:
    net = Scaled()
    compiled, x = subject.compile(net), torch.randn(3)
    for by in (2.0, 5.0, 2.0):
        net.by = by
        is_(compiled(x), net(x), f"the result with the attribute {by}")


@case("train() and eval() are not told apart after compiling.", "Dropout and batch norms go by it.")
def training_and_evaluation(subject: Subject) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    compiled, x = subject.compile(net), torch.randn(5, 3)
    for training in (True, False, True, False):
        net.train(training)
        before = {name: b.clone() for name, b in net.named_buffers()}
        mine = compiled(x)
        with torch.no_grad():
            for name, b in net.named_buffers():
                b.copy_(before[name])
        is_(mine, net(x), f"the result with training={training}")


@case("More programs than the limit allows give wrong results.", "Beyond it, torch runs eager.")
def beyond_the_limit(subject: Subject) -> None:
    def f(x: Tensor, how: int) -> Tensor:
        return x * how if how % 2 else x - how

    with torch._dynamo.config.patch(recompile_limit=2, specialize_int=True):
        compiled, x = subject.compile(f), torch.randn(4)
        for how in (1, 2, 3, 4, 5, 1):
            is_(compiled(x, how), f(x, how), f"the result of program {how}")


@case("Options of one function are used for another.", "A cache's key lacks them.")
def two_sets_of_options(subject: Subject) -> None:
    if subject.other_options is None:
        raise NotApplicable(
            "asks for a second set, under which half types round otherwise: --conformance-other-options"
        )
    x = torch.randn(64, 64).bfloat16()

    def f(t: Tensor) -> Tensor:
        return torch.softmax((t * 0.3).sin() + t.tanh(), -1)

    found = []
    for options in (subject.options, subject.other_options) * 2:
        torch._dynamo.reset()
        found.append(subject.compile(f, options=options, fullgraph=True)(x))
    for i, result in enumerate(found):
        is_(result, f(x), f"the result with options {dict((subject.options, subject.other_options)[i % 2])}", 4)
    same = torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    expect(same, "compiled in turns, a set of options does not give the same bits every time")
    expect(not torch.equal(found[0], found[1]), "both sets of options give the same bits: one is used for the other")


@case("A program compiled under one default type is used under another.", "torch.ones() has it.")
def default_type_changes(subject: Subject) -> None:
    compiled = subject.compile(lambda n: torch.ones(3) * n)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        result: Any = compiled(2)
        expect(result.dtype == dtype, f"torch.ones() is {result.dtype} where the default is {dtype}")


def curve(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x * 2.5, -1) + y


def _loads(name: str, options: dict[str, Any], blob: bytes, x: Tensor, y: Tensor, answer: Any) -> None:
    """In another process: the artifacts are loaded once the backend is known, and then it is used."""
    torch._dynamo.lookup_backend(Subject(name).backend)
    logging.disable(logging.CRITICAL)
    if torch.compiler.load_cache_artifacts(blob) is None:
        answer.send("the artifacts cannot be loaded, those of others neither")
        return
    told = unequal(Subject(name, options).compile(curve, fullgraph=True)(x, y), curve(x, y), 10)
    answer.send(f"the result {told}" if told else "")


@case(
    "Artifacts for torch.compiler.load_cache_artifacts cannot be loaded.",
    "Fleets start warm with one such blob.",
    starts_processes=True,
)
def saved_artifacts(subject: Subject) -> None:
    x, y = torch.randn(4, 6), torch.randn(6)
    with CacheArtifactManager.with_fresh_cache():
        subject.compile(curve, fullgraph=True)(x, y)
        saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise NotApplicable("this backend adds nothing to torch.compiler.save_cache_artifacts")
    words = subject.name, dict(subject.options), saved[0], x, y
    told = anew(_loads, words, 2 * subject.patience)
    expect(not told, f"in another process {told}")


@case("A function that was compiled ahead of time is another one once loaded.", "Servers load what builders saved.")
def compiled_ahead_of_time(subject: Subject) -> None:
    compiled = subject.compile(curve, fullgraph=True)
    if not hasattr(compiled, "aot_compile"):
        raise NotApplicable("this torch has no aot_compile")
    x, y = torch.randn(4, 6), torch.randn(6)
    try:
        made = compiled.aot_compile(((x, y), {}))
    except RuntimeError as error:
        if "SerializableCallable" not in str(error):
            raise
        raise NotApplicable("what this backend compiles cannot be saved, which torch says") from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "function")
        made.save_compiled_function(str(file))
        torch._dynamo.reset()
        with file.open("rb") as opened:
            loaded: Any = torch.compiler.load_compiled_function(opened)
    for function, what in ((made, "as compiled"), (loaded, "as loaded")):
        for _ in range(2):
            x = torch.randn(4, 6)
            is_(function(x, y), curve(x, y), f"{what}, the result", 10)
