"""docs/walkthrough.md: two models through every stage of a compilation, with the text that each stage has.

What is shown is what ``MLC_DUMP_DIR`` writes, file after file, and what ``explain`` tells; how many passes there are,
and what they are called, is read from there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import fx
from torch._dynamo import pgo
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import logging_utils
from torch._functorch.aot_autograd import make_boxed_func

from tests.docs import walked
from torch_mlc.dynamo_backend.entry.backend import through_aot
from torch_mlc.dynamo_backend.explaining.explain import explain
from torch_mlc.ir.target import Target
from torch_mlc.runtime import targets
from torch_mlc.runtime.settings.options import Options

MOST_LINES, MOST_WIDE = 36, 180
# Of lines that are wider, so much of their begin and end.
AT_BEGIN, AT_END = 110, 70
# A text that has so much of the one before it is told by the lines that changed.
ALIKE = 0.3
# The CPU of the page, whichever runs the tests.
CPU = Target(
    "cpu", "haswell", 4, vector_bytes=32, l1_bytes=32 << 10, l2_bytes=1 << 20, warp=1, max_threads=1,
    features="+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+popcnt,+sse3,+sse4.1,+sse4.2,+ssse3",
)  # fmt: skip

HEAD = """# Walkthrough: two models through every stage

Made by `pytest tests/docs --update-golden` from the models of `tests/docs/walked.py`; do not edit. Each stage is shown
with the text that it really has, as `MLC_DUMP_DIR` writes it. Of what a pass has rewritten only the lines that changed
are shown, and passes that changed nothing are left out. Long texts are shown without their middle, long lines without
theirs, LLVM IR without `alloca` and `declare`, and of the places in the model, which stand behind `#`, only file
and line. The words are explained in the [glossary](glossary.md).

"""
FUSED = (
    "**Fused.** Nodes that share loops have become tensor functions. A function has a domain (rows, and inner "
    "dimensions that reductions go over), stages that make values at its points, and outputs. Each becomes one kernel."
)
HOST = (
    "**Host program.** What runs for a call: allocations, launches, library calls, views and frees. `k0_` and so on "
    "are the kernels."
)
LOWERED = "**Lowered.** The function `{of}` as a loop nest: a loop tree a stage, with no decision taken."
# What is told before a file whose name begins so; where several do, the longest counts.
TOLD = {
    "input": "**Imported.** Each op has become nodes that say what one element of the result is: loads with their "
    "indices, arithmetic, reductions by a monoid. Views are nodes with an index map.",
    "input of torch": "**Handed over.** The graph of ATen ops, as AOTAutograd hands it over.",
    "import_graph": "**Imported.** Each op has become nodes that say what one element of the result is: loads with "
    "their indices, arithmetic, reductions by a monoid. Views are nodes with an index map.",
    "simplify_algebra": "**Algebra.** Constants are folded, and what cancels is gone.",
    "eliminate_common": "**Common nodes.** Nodes that compute the same have become one.",
    "alias_copies": "**Copies.** A copy that nobody can tell from its operand has become a view.",
    "settle_scatters": "**Known places.** A scatter whose places no data decide says what each element is.",
    "begin_scatters": "**Sums of scatters.** What is scattered and added to a product is scattered into it.",
    "rewrite_attention": "**Attention.** The softmax between two matrix products has become one reduction by the "
    "attention monoid, whose state is a maximum, a sum and a weighted sum.",
    "chain_products": "**Chains.** Matrix products of functions of other products' results have become sums that take "
    "those results up as they are made. No matrix of scores is left.",
    "rewrite_logsumexp": "**Log-sum-exp.** A softmax's maximum and sum have become one reduction.",
    "decompose_contractions": "**Matrix products.** Those that pay have become sums of products, which fuse as other "
    "reductions do.",
    "split_reductions": "**Split reductions.** A reduction with few rows goes over pieces, which a second combines.",
    "eliminate_dead": "**Dead nodes.** What nobody reads is gone.",
    "fuse": FUSED,
    "partition": FUSED,
    "outline": "**Outlined.** What is never to be in memory, or is written where data say, is a function of its own: a "
    "chain or a scatter.",
    "share_nodes": "**Shared.** Nodes that compute the same have become one, so that one of them is saved.",
    "recompute_scores": "**Attention in training.** The forward makes the largest score and the logarithm of the sum "
    "of each row as well. The backward computes scores again, and probabilities from those two.",
    "write_over_dead": "**Overwriting.** Calls are told whose memory each result may take (`into`); `None` is its own.",
    "write_in_place": "**In place.** What is copied over an input at the end is written there at once.",
    "write_slices": "**Slices.** Parts of a concat are written where they belong.",
    "part_side_by_side": "**Side by side.** A call that does one thing several times has become as many calls.",
    "share_launches": "**Few launches.** Calls side by side that run equal functions have become one.",
    "order_for_memory": "**Order.** The calls stand in an order that holds less memory.",
    "substitute_single_uses": "**One use.** A value of the function `{of}` that is used once stands where it is used.",
    "collapse": "**Dimensions.** Dimensions of the function `{of}` that all its accesses see as one have become one.",
    "lower_stages": LOWERED,
    "lowered": LOWERED,
    "rule": "**Scheduled.** The rule `{rule}` fits that nest. These are the primitives that it applies, each of which "
    "has proved that the program means the same.",
    "scheduled": "**The nest afterwards.** Kinds of loops say what becomes threads, lanes and tiles.",
    "emit": "**Emitted.** The text of the kernel `{of}`, from the nest alone.",
    "build_host": HOST,
    "track_views": "**Views.** What the caller gets of one memory is made views of it, to autograd too.",
    "plan_memory": "**Memory.** What only kernels look at has got places in one arena.",
    "host": HOST,
    "host_code": "**As it runs.** The text of the host program that is executed.",
}  # fmt: skip
OTHERWISE = "**The step `{name}`.** This is what it has made."


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the page, with its inputs and what is told of it."""

    title: str
    intro: str
    call: Callable[..., Any]
    inputs: Callable[[], Sequence[torch.Tensor]]
    settings: Mapping[str, Any]

    @property
    def training(self) -> bool:
        return bool(self.settings.get("training"))


def number_from_zero(patch: Callable[[Any, str, Any], None]) -> None:
    """As in a new process: no sizes seen, and graphs numbered from zero."""
    patch(aot_autograd, "AOT_COUNTER", count())
    patch(logging_utils, "nth_graph", 0)
    pgo.reset_code_state()
    torch._dynamo.reset()
    torch.manual_seed(0)


def block(text: str, language: str = "text") -> str:
    """A text as a fenced block: long ones without their middle, without anybody's folders."""
    text = re.sub(r"/[\w./-]*/(?=\w+\.py\b)", "", text).rstrip().lstrip("\n")
    text = re.sub(r"( # .*?\w+\.py:\d+) in .*$", r"\1", text, flags=re.MULTILINE)
    lines = text.expandtabs().splitlines()
    if language == "llvm":  # what no instruction is
        lines = [line for line in lines if not re.match(r"(.* = alloca |declare |attributes |!|;? ?$)", line)]
    lines = [(line if len(line) <= MOST_WIDE else f"{line[:AT_BEGIN]} … {line[-AT_END:]}").rstrip() for line in lines]
    if len(lines) > MOST_LINES:
        first, last = MOST_LINES * 3 // 4, MOST_LINES // 4
        lines = [*lines[:first], f"... {len(lines) - first - last} lines", *lines[-last:]]
    return f"```{language}\n" + "\n".join(lines) + "\n```\n"


def changed_lines(before: str, after: str) -> str:
    """The lines of a text that were not in the one before it, with those whose place they took; "" where the texts have
    little in common."""
    old, new = before.splitlines(), after.splitlines()
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < ALIKE:
        return ""
    told: list[str] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            told.append(f"  ... {b - a} lines as before")
        else:
            told += [f"- {line}" for line in old[a:b]] + [f"+ {line}" for line in new[c:d]]
    return "\n".join(told)


def wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def captured(model: Model) -> tuple[str, list[tuple[str, str]]]:
    """Dynamo's graph of a model, and AOTAutograd's of that by their kinds, as code."""
    dynamo: list[str] = []
    aten: list[tuple[str, str]] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            aten.append((kind, graph.code))
            return make_boxed_func(graph.forward)

        return keep

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        dynamo.append(gm.code)
        return through_aot(gm, inputs, Options(target=model.settings.get("target")), compiler)

    with torch.set_grad_enabled(model.training):
        result = torch.compile(model.call, backend=backend)(*model.inputs())
        if model.training:
            result.sum().backward()
    (whole,) = dynamo
    return whole, aten


def told(name: str, **of: str) -> str:
    """What is told before a stage."""
    known = [key for key in TOLD if name.startswith(key)]
    return (TOLD[max(known, key=len)] if known else OTHERWISE).format(name=name, **of)


def stages(folder: Path, kernels: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """What a folder of numbered dumps has: what is told before a text, the text and its language. A file that is as the
    one before it is left out."""
    before = before_language = ""
    for file in sorted(folder.iterdir()):
        text, language = file.read_text(), {".py": "python", ".ll": "llvm"}.get(file.suffix, "text")
        name, of = split_name(file.stem, kernels)
        if text == before:
            continue
        change = changed_lines(before, text) if language == before_language else ""
        before, before_language = text, language
        if name != "schedule":
            known = "input of torch" if (name, language) == ("input", "python") else name
            yield told(known, of=of), change or text, "diff" if change else language
            continue
        parts = re.split(r"^# (lowered|rule .*|scheduled)\n", text, flags=re.MULTILINE)
        for title, part in zip(parts[1::2], parts[2::2], strict=True):
            word, _, rule = title.partition(" ")
            yield told(word, of=of, rule=rule), part, "python" if word == "rule" else "text"


def split_name(stem: str, kernels: Collection[str]) -> tuple[str, str]:
    """The step of a file ``07_emit_fused_add_0``, and the kernel that it is about, if one: emit, fused_add_0."""
    name = re.sub(r"^\d+_", "", stem)
    of = max((k for k in kernels if name.endswith(f"_{k}")), key=len, default="")
    return (name.removesuffix(f"_{of}"), of) if of else (name, "")


def walk(model: Model, folder: Path, start: Callable[[], None]) -> Iterator[str]:
    """The lines of a model's part of the page; ``start`` is called before each compilation."""
    start()
    dynamo, aten = captured(model)
    start()
    options = {"dump_dir": str(folder), "threads": CPU.cores}
    report = explain(model.call, *model.inputs(), options=options, **model.settings)
    folders = sorted((f for f in folder.iterdir() if f.is_dir()), key=written_at)
    yield f"## {model.title}\n\n{wrapped(model.intro)}\n\n{block(inspect.getsource(model.call), 'python')}"
    yield "### What Dynamo gives\n"
    yield "TorchDynamo has run the function's bytecode and kept torch's calls as an FX graph.\n"
    yield block(dynamo, "python")
    if not any(file.match("*_input.py") for f in folders for file in f.iterdir()):
        yield from walk_aten(aten)
    for graph in folders:
        kind = next((k for k in ("joint", "forward", "backward", "inference") if k in graph.name), graph.name)
        yield f"### Inside the compiler: the {kind} graph\n"
        for text, shown, language in stages(graph, [kernel.name for kernel in report.kernels]):
            yield f"{wrapped(text)}\n\n{block(shown, language)}"
    yield "### What `explain` tells\n"
    yield "Launches, the bytes that kernels move, and the least that any program would have to move.\n"
    yield block("\n\n".join("\n".join(timeless(str(graph))) for graph in report.graphs))


def walk_aten(aten: Sequence[tuple[str, str]]) -> Iterator[str]:
    """AOTAutograd's graphs by their kinds, for where no dump has them."""
    cut = " The joint graph of forward and backward is cut in two." if len(aten) > 1 else ""
    yield "### What AOTAutograd makes of it\n"
    yield wrapped(
        "The same in ATen ops, without side effects, decomposed where the compiler has no use for an op as a whole."
        + cut
    )
    yield ""
    for kind, code in aten:
        yield f"The {kind} graph:\n\n{block(code, 'python')}" if len(aten) > 1 else block(code, "python")


def written_at(folder: Path) -> int:
    """When the first file of a folder was written."""
    return min(f.stat().st_mtime_ns for f in folder.iterdir())


def timeless(text: str) -> list[str]:
    return [line for line in text.splitlines() if "compile time" not in line]


MODELS = (
    Model(
        "Softmax and layer norm, on a CPU",
        "The CPU is one of 4 cores with AVX2. The whole becomes one kernel.",
        walked.normalised,
        lambda: (torch.randn(512, 1000), torch.randn(1000), torch.randn(1000)),
        {},
    ),
    Model(
        "Causal attention in training, for sm_90",
        "No GPU is needed to look at this: the graphs are compiled for `cuda:sm_90` all the same. The forward becomes "
        "one kernel and the backward two, and no matrix of scores is ever in memory.",
        walked.attention,
        lambda: [torch.randn(4, 16, 256, 64, dtype=torch.half, requires_grad=True) for _ in range(3)],
        {"target": "cuda:sm_90", "training": True},
    ),
)


def walkthrough(folder: Path, patch: Callable[[Any, str, Any], None]) -> str:
    """The page. ``patch`` sets an attribute for as long as the page is made."""
    patch(targets, "cpu_target", lambda cores=None, products="auto", libraries="aten": CPU)
    page = HEAD
    for number, model in enumerate(MODELS):
        page += "\n".join(walk(model, folder / str(number), partial(number_from_zero, patch))) + "\n"
    return page.rstrip("\n") + "\n"
