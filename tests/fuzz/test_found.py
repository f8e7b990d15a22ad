"""Programs that random search has found wrong, made small. Each was mended; each stays right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz.check import check
from tests.fuzz.lines.draws import FILLS
from tests.fuzz.program import Input, Program, Step, mentioned
from tests.fuzz.values import namespace

EPS = float(torch.finfo(torch.float32).eps)


def found(
    inputs: str, body: str, *returns: str, sizes: tuple[dict[str, int], ...] = ({"A": 4},),
    dynamic: bool | None = False, gradient: bool = False, capture: bool = False, eps: float = EPS,
    options: dict[str, Any] | None = None,
) -> Program:  # fmt: skip
    """A program of lines of text. Inputs of floats ask for gradients where there are ``gradient``s, if not detached."""
    made = []
    for line in inputs.strip().splitlines():
        name, _, text = line.strip().partition(" = ")
        made.append(Input(name, text, "float" in text and "detach" not in text))
    names = [i.name for i in made]
    steps = []
    for line in body.strip().splitlines():
        left, equals, right = line.strip().partition(" = ")
        results = tuple(left.split(", ")) if equals and left[0] == "t" and "[" not in left else ()
        text = right if results else line.strip()
        steps.append(Step(text, results, mentioned(text, names), "compute" if results else "write", eps))
        names += results
    program = Program(0, tuple(made), tuple(steps), returns, sizes, dynamic, gradient, capture)
    return replace(program, options=options or {})


FOUND = {
    "a part whose extent is an expression that a guard makes one is broadcast": found(
        "x0 = numbers((A, 1, B), torch.float32, 1)\nx1 = numbers((A, 2 * A, 1), torch.float64, 2)[:, ::2]",
        "t0, t1 = x1.chunk(2, -3)\nt2 = x0 * t1", "t2", sizes=({"A": 2, "B": 4},), dynamic=True,
    ),
    "a loop over nothing is fused with another": found(
        "x0 = numbers((2, A, A), torch.float32, 1)\nx1 = places((0,), A, 2)",
        "t0 = torch.index_select(x0, 1, x1)", "t0",
    ),
    "two loops over nothing are fused": found("x0 = numbers((4, 0, 0), torch.float32, 1)", "t0 = torch.sgn(x0)", "t0"),
    "dimensions that are symbols and one that is nothing are flattened": found(
        "x0 = numbers((A, 9, 0), torch.float32, 1)", "t0 = x0.flatten(0, 1)", "t0", dynamic=True,
    ),
    "what reads a part of no elements is weighed": found(
        "x0 = numbers((1, A), torch.float32, 1)",
        "t0 = torch.sin(x0[1:])\nt1 = torch.where(rand(t0) < 0.5, t0, 0.0)", "t1",
    ),
    "two streams add their gradients: each node is computed by one of them": found(
        "x0 = numbers((1, A, 4), torch.float32, 1)",
        "t0 = (x0 @ x0.transpose(-1, -2)).masked_fill(~torch.ones(x0.shape[-2], x0.shape[-2], dtype=torch.bool).tril(),"
        " float('-inf'))\nt1 = torch.softmax(t0, -1) @ x0", "t1", gradient=True,
    ),
    "what follows a stream reads, besides its result, something else that is made of it": found(
        "x0 = numbers((1, A, 1), torch.float32, 1)",
        "t0 = torch.softmax(x0 @ x0.transpose(-1, -2), -1) @ x0\nt1 = torch.xlogy(t0, t0.abs() + 0.5)", "t1",
    ),
    "streams of features of one element are followed": found(
        "x0 = numbers((A, 1, A, 1), torch.float32, 1)",
        "t0 = torch.softmax(x0 @ x0.transpose(-1, -2), -1) @ x0", "t0", gradient=True,
    ),
    "the sum that a gradient of scores needs is of the gradient of the output as products read it": found(
        "x0 = (numbers((A, 9, 9), torch.bfloat16, 71402) * 4)",
        "t0 = torch.softmax(x0 @ x0.transpose(-1, -2) * 0.3, -1) @ x0\nt1 = torch.atanh(torch.tanh(t0) * 0.5)",
        "t0", "t1", gradient=True, eps=float(torch.finfo(torch.bfloat16).eps),
    ),
    "integers truncate a factor": found(
        "x0 = numbers((A,), torch.int64, 1)", "t0 = torch.addcmul(x0, x0, x0, value=-2.5)", "t0",
    ),
    "a bag of embeddings whose other results the library leaves empty": found(
        "x0 = numbers((A, 2), torch.bfloat16, 1)\nx1 = places((3, 2), A, 2, torch.int64)",
        "t0 = F.embedding_bag(x1, x0, mode='sum')", "t0", dynamic=True,
    ),
    "an input that the forward writes is read by the backward as it was": found(
        "x0 = numbers((A, 2), torch.float32, 1)\nx1 = numbers((A, 1), torch.float32, 2).detach()",
        "t0 = F.binary_cross_entropy_with_logits(x0[:, 1:], x1.sigmoid(), reduction='none')\nx1[1:] += 1\nt1 = t0 ** 2",
        "t1", gradient=True,
    ),
    "another row of an attention is read beside each": found(
        "x0 = numbers((2, A, A), torch.float32, 1)", "t0 = torch.softmax(x0 @ x0.transpose(-1, -2), -1) @ x0\n"
        "t1 = torch.select_scatter(t0, t0.select(1, 0) * 2, 1, -1)", "t1",
    ),
    "one feature of an attention is all that is read": found(
        "x0 = numbers((2, A, A), torch.float32, 1)",
        "t0 = torch.softmax(x0 @ x0.transpose(-1, -2) * 0.3, -1) @ x0\nt1 = t0[..., 0] * 2", "t1",
    ),
    "sums of a row of an attention are read at its first feature where no tile combines them": found(
        "x0 = numbers((B, C, 3), torch.float32, 1)",
        "t0 = x0.chunk(2, 1)[0]\nt1 = torch.ones(t0.shape[-2], t0.shape[-2], dtype=torch.bool).tril()\n"
        "t2 = torch.softmax(torch.where(t1, t0 @ t0.transpose(-1, -2), -1e4), -1) @ t0",
        "t2", sizes=({"B": 13, "C": 17}, {"B": 3, "C": 7}), dynamic=None, gradient=True,
    ),
    "numbers are rounded to eight bits": found(
        "x0 = numbers((A, 9), torch.float16, 1)\nx1 = numbers((A, 9), torch.int8, 2, 'range')",
        "t0 = x0.to(torch.float8_e5m2).to(torch.float16) * 0.5\n"
        "t1 = x1.to(torch.float8_e4m3fn).to(torch.float32)\nt2 = x0.float().to(torch.float8_e5m2).float() + 1",
        "t0", "t1", "t2", eps=0.0,
    ),
    "draws that nobody reads come before others": found(
        "x0 = numbers((A, 3), torch.float32, 1)",
        "t0 = F.dropout(x0, 0.5)\nt0.copy_(x0)\nt1 = rand(t0) + torch.rand(3)", "t0", "t1",
    ),
    "what a checkpoint draws again needs no tensor": found(
        "x0 = numbers((A, 3), torch.float16, 1)", "t0 = recomputed(lambda p: rand(p) * p, x0)", "t0", gradient=True,
    ),
    "what a checkpoint draws for no elements is no token": found(
        "x0 = numbers((A, 0), torch.float32, 1)", "t0 = recomputed(lambda p: F.dropout(p, 0.5), F.dropout(x0, 0.5))",
        "t0", gradient=True,
    ),
    "an attention of no heads has a mask of its own, and a gradient": found(
        "x0 = numbers((4, A, 4, 4), torch.float32, 1)",
        "t0 = torch.ones(x0.shape[-2], x0.shape[-2], dtype=torch.bool).tril()\n"
        "t1 = torch.softmax(torch.where(t0, x0 @ x0.transpose(-1, -2), -1e4), -1) @ x0",
        "t1", sizes=({"A": 0},), gradient=True,
    ),
    "unsigned words are joined by what kernels are verified with": found(
        "x0 = numbers((A, 4, 1), torch.uint64, 1)\nx1 = numbers((A, 3), torch.uint16, 2)",
        "t0 = torch.cat([x0, x0 * 2])\nt1 = torch.cat([x1, x1 * 2], -1)", "t0", "t1", dynamic=True,
        options={"verify": 1},
    ),
    "sizes that no guard ties are drawn apart where a scatter is verified": found(
        "x0 = numbers((B, 1, 1, 4), torch.int64, 1).expand(B, 1, A, 4).contiguous()\n"
        "x1 = numbers((8,), torch.int64, 2)[::2]\nx2 = numbers((4, 8, B), torch.int64, 3)\n"
        "x3 = places((4,), 1, 4, torch.int64)",
        "t0 = x0.transpose(-2, -1).transpose(3, -4)\nt1 = torch.cat([t0, t0], 2)\n"
        "t2 = torch.index_put(t1, (x1.long() % t1.shape[0], x3), x2, accumulate=True)", "t2",
        sizes=({"A": 5, "B": 4}, {"A": 3, "B": 13}), dynamic=None, options={"verify": 1},
    ),
    "a result of float64 is made of a sigmoid in float32, and verified": found(
        "x0 = numbers((A, 1), torch.float64, 10339600)", "t0 = x0[::2]\nt1 = torch.sigmoid(t0.float()) * t0", "t1",
        sizes=({"A": 3},), options={"verify": 1},
    ),
    "a scalar tensor is turned round": found("x0 = numbers((), torch.float32, 1)", "t0 = x0.flip(0)", "t0"),
    "results of a product are read twice, as axes that split its own": found(
        "x0 = numbers((A, 1, B, 4), torch.float32, 1)\nx1 = numbers((4, 16), torch.float32, 2)\n"
        "x2 = numbers((4, 2 * 16), torch.float32, 3)[:, ::2]",
        "t0 = torch.softmax(x0 @ x1 * 0.3, -1) @ x2.t()\nt1 = torch.complex(t0, t0)", "t1",
        sizes=({"A": 2, "B": 2},),
    ),
    "values that share most of what they are made of are looked through once": found(
        "x0 = numbers((1, B, B, A), torch.float32, 1)\nx1 = numbers((1, B, B, A), torch.bool, 2)\n"
        "x2 = numbers((1, B, B, A), torch.float32, 3)",
        "t0 = x0.masked_scatter(x1, x2)\nt1 = F.instance_norm(t0, eps=0.1)", "t1",
        sizes=({"A": 3, "B": 7},), gradient=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    outcome = check(FOUND[name])
    assert outcome.status == "equal", outcome


def test_strides_that_differ_where_sizes_are_symbols_are_those_that_torch_promises() -> None:
    """Torch's fake tensors give a dimension of one element another stride than eager, which decides the layout of a
    concatenation behind it."""
    program = found(
        "x0 = numbers((1, A, A, B), torch.float64, 107500).permute((1, 3, 0, 2))\nx1 = numbers((2,), torch.float32, 1)",
        "t0 = torch.nanmean(x1)\nt1 = torch.clamp(x0, min=t0)\nt2 = torch.column_stack([t1, t1])", "t2",
        sizes=({"A": 2, "B": 2},), dynamic=True,
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status == "torch" and "torch's fake tensors have strides (8, 1, 8, 4)" in outcome.detail


@pytest.mark.parametrize("fill", FILLS)
def test_what_draws_rounds_nothing_that_a_kernel_may_round_otherwise(fill: str) -> None:
    """Else the numbers of the program in double precision are not those of the kernel (seed 80074)."""
    run = eval(f"lambda like: drawn(lambda t: {fill}, like)", namespace(compiled=True))
    compiled = torch.compile(run, backend="mlc", options={"fallback_random": True})
    like, made = torch.empty(3, 50), []
    for fn in (run, compiled):
        torch.manual_seed(1)
        made.append(fn(like))
    assert torch.equal(*made)


def test_strides_that_torch_promises_of_what_a_branch_gave() -> None:
    program = found(
        "x0 = numbers((A, 2, 2, A), torch.float32, 1).permute((0, 2, 3, 1))\nx1 = numbers((2,), torch.int64, 2)",
        "t0 = cond(x1.sum() > 0, lambda p: p.abs(), lambda p: p * 1, (x0,))\nt1 = F.logsigmoid(t0)", "t1",
        sizes=({"A": 1},),
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status == "torch" and "torch's fake tensors have strides (4, 1, 4, 2)" in outcome.detail


def test_strides_that_torch_promises_for_numbers_that_vary() -> None:
    """Torch copies what is padded by nothing as it lies in memory, but not where the padding is a symbol (193547)."""
    program = found(
        "x0 = numbers((A, 2), torch.float32, 1).permute((1, 0))\nx1 = A", "t0 = F.pad(x0, (abs(x1) % 3, x1 % 2))", "t0",
        sizes=({"A": 6},), dynamic=True,
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status == "torch" and "torch's fake tensors have strides (6, 1)" in outcome.detail


def test_strides_that_torch_promises_behind_what_a_value_says() -> None:
    """Powers of a number are contiguous, but for fake tensors (185049)."""
    program = found(
        "x0 = numbers((A, 2), torch.int64, 1).permute((1, 0))", "t0 = x0 % 5 + bool(x0.any())\nt1 = 2.0 ** t0", "t1",
        sizes=({"A": 4},),
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status == "torch" and "torch's fake tensors have strides" in outcome.detail


def test_draws_of_what_torch_promises_in_another_layout() -> None:
    """Of rows that an index takes, where the memory of both dimensions may come first (210716)."""
    program = found(
        "x0 = numbers((2, A), torch.float32, 1).permute((1, 0))\nx1 = places((3,), A, 2, torch.int64)",
        "t0 = x0[None, x1]\nt1 = t0 * 2 + 1\nt2 = F.dropout(t1, 0.4).sum(2)", "t2", sizes=({"A": 1},),
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status == "torch" and "strides (1, 1, 3) for" in outcome.detail, outcome


def test_strides_that_torchs_graph_promises_behind_a_write() -> None:
    """What is written is another tensor in the graph, where dimensions of one element have other strides (216285)."""
    program = found(
        "x0 = numbers((1, A, 1), torch.float32, 1)\nx1 = numbers((1, 1, A), torch.float32, 2)",
        "x0.transpose(0, -1)[..., :1].add_(1)\nt0 = torch.einsum('bij,bjk->bki', x0, x1)", "t0", sizes=({"A": 4},),
    )  # fmt: skip
    outcome = check(program)
    assert outcome.status in ("torch", "equal"), outcome
