"""Linear + cross-entropy by chunks of rows: logits over a large vocabulary never exist in full.

Cross-entropy gives one number, so what flows back into it is one factor: gradients of rows, weight and bias can be made
for the factor 1 right after a chunk's logits, and multiplied by it later. The rewrite works on the graph that holds
forward and backward, before they are parted, and on graphs for inference; it follows the data from the product to
everything that reads its logits. Source: Liger kernels (Hsu et al. 2024); here without a kernel of its own, since the
ops of a chunk are fused like any others.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....ir.target import multiplies_halves
from ....scheduler.numerics import rounds_as_eager
from ...tracing.hints import hint_of
from ..context import AtenContext
from ..write import NodeWriter
from .chunk_loss_match import LossSite, RefusedLoss, find_losses

aten = torch.ops.aten

# Smaller logits stay whole: chunks save no memory that anybody misses, of which a GPU has tens of GB.
LEAST_BYTES, LEAST_BYTES_GPU = 64 << 20, 1 << 30
# A GPU reads and writes the sum of weight gradients, in float32, in a tenth of the time that it takes to multiply for
# so many rows.
ROWS_GPU = 2560
# The graph holds every chunk, so there is a limit to how many are written out.
MOST_CHUNKS = 64
_NONE, _MEAN = 0, 1
_HALVES = (torch.bfloat16, torch.float16)


def chunk_losses(gm: fx.GraphModule, context: AtenContext) -> int:
    """Rewrite, in place, every linear + cross-entropy with large logits; the number of losses that were rewritten.

    Products whose logits stay whole get the reason as the note ``mlc_note`` of their node, for reports.
    """
    options = context.options
    rows = options.loss_chunk
    if rows == 0 or (rows is None and rounds_as_eager(options.numerics)):
        return 0
    done = 0
    for found in find_losses(gm.graph):
        on_gpu = options.gpu is not None or found.product.meta["val"].is_cuda
        if not _is_large(found.product, rows, LEAST_BYTES_GPU if on_gpu else LEAST_BYTES):
            continue
        match found:
            case RefusedLoss(product, reason):
                product.meta["mlc_note"] = f"logits of a loss stay whole: {reason}"
            case LossSite():
                count = _chunks(found, rows, ROWS_GPU if on_gpu else 1)
                if count > 1:
                    _Rewrite(gm.graph, found, count).run()
                    done += 1
    if done:
        gm.graph.lint()
        gm.recompile()
    return done


def _is_large(product: fx.Node, rows: int | None, least: int) -> bool:
    value = product.meta["val"]
    if rows is not None:
        return hint_of(value.shape[0]) > rows
    return hint_of(value.shape[0]) * hint_of(value.shape[1]) * value.element_size() > least


def _chunks(site: LossSite, rows: int | None, least: int) -> int:
    """How many chunks, of at least ``least`` rows where ``rows`` does not say; for sizes that vary, so many that chunks
    keep their bound up to the next power of two of rows.

    A chunk of as many rows as the product has columns to sum makes the sum of weight gradients, which is read and
    written once a chunk, cheap next to the products; its logits take as much memory as the weight.
    """
    logits = site.product.meta["val"]
    count = site.log_probabilities.meta["val"].shape[0]
    wide, deep = site.classes, site.features
    chunk = rows or max(deep, LEAST_BYTES // (wide * logits.element_size()), least)
    if isinstance(count, int):
        return min(-(-count // chunk), MOST_CHUNKS)
    most = 1 << (hint_of(count) - 1).bit_length()
    # The comparison is a guard: more rows than that are compiled anew.
    if not count <= most:
        raise AssertionError("a size is above a bound that was made from it")
    return int(min(-(-most // chunk), MOST_CHUNKS))


@dataclass(slots=True)
class _Rewrite:
    """One loss: the chunks where the loss was, the gradients' factors where the gradients were."""

    graph: fx.Graph
    site: LossSite
    count: int
    out: NodeWriter = field(init=False)
    wide: torch.dtype = field(init=False)  # of sums over rows and chunks

    def __post_init__(self) -> None:
        dtype = self.site.log_probabilities.meta["val"].dtype
        self.out = NodeWriter(self.graph, self.site.product)
        self.wide = torch.float64 if dtype is torch.float64 else torch.float32

    def run(self) -> None:
        site, out = self.site, self.out
        with self.graph.inserting_before(site.loss):
            rows = out.replay(site.row_maps, site.rows, site.classes, site.features)
            size = rows.meta["val"].shape[0]
            chunk, padding = self.chunk_size(rows)
            xs = self.split(rows, padding, chunk)
            # Converted once: conversions chunk by chunk would be one launch that waits for the last chunk.
            summed = (
                self.split(out.cast(rows, self.factor), padding, chunk)
                if self.factor is not rows.meta["val"].dtype
                else xs
            )
            targets = self.labels(padding, chunk)
            counts = out.call(aten.sum.default, out.call(aten.ne.Scalar, site.target, site.ignore))
            total = out.call(aten._to_copy.default, counts, dtype=self.wide)
            sums = self.chunks(xs, summed, targets, total, chunk)
            loss = out.call(aten.view.default, sums.pop("loss"), [])
            if site.reduction == _MEAN:
                loss = out.call(aten.div.Tensor, loss, total)
            loss = out.cast(loss, site.value.meta["val"].dtype)
            for one in sums.values():
                one.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        out.replace(site.value, loss)
        if site.gradient is not None:
            self.scale(sums, total, size)
        out.drop(site.region)

    def chunk_size(self, rows: fx.Node) -> tuple[Any, Any]:
        """Rows of a chunk, and rows of padding that the last one needs: numbers, or nodes where sizes vary."""
        out, size = self.out, rows.meta["val"].shape[0]
        if isinstance(size, int):
            chunk = -(-size // self.count)
            return chunk, chunk * self.count - size
        n = out.call(aten.sym_size.int, rows, 0)
        chunk = out.call(operator.floordiv, out.call(operator.add, n, self.count - 1), self.count)
        return chunk, out.call(operator.sub, out.call(operator.mul, chunk, self.count), n)

    def split(self, whole: fx.Node, padding: Any, chunk: Any) -> list[fx.Node]:
        out = self.out
        if padding != 0:
            whole = out.call(aten.constant_pad_nd.default, whole, [0, 0, 0, padding], 0.0)
        if not whole.meta["val"].is_contiguous():
            whole = out.call(aten.clone.default, whole, memory_format=torch.contiguous_format)
        parts = out.call(aten.view.default, whole, [self.count, chunk, self.site.features])
        return [out.call(aten.select.int, parts, 0, k) for k in range(self.count)]

    def labels(self, padding: Any, chunk: Any) -> list[fx.Node]:
        """The targets of each chunk, in memory of their own: so all chunks run one kernel, with no offset in it."""
        out, target = self.out, self.site.target
        if padding != 0:
            target = out.call(aten.constant_pad_nd.default, target, [0, padding], self.site.ignore)
        found = []
        for k in range(self.count):
            start = k * chunk if isinstance(chunk, int) else out.call(operator.mul, chunk, k)
            found.append(out.call(aten.narrow_copy.default, target, 0, start, chunk))
        return found

    def chunks(
        self, xs: list[fx.Node], summed: list[fx.Node], targets: list[fx.Node], total: fx.Node, chunk: Any
    ) -> dict[str, fx.Node]:
        """The loss summed, and the gradients of that sum, by the operand that they are of."""
        site, out = self.site, self.out
        dtype, computed = site.product.meta["val"].dtype, site.log_probabilities.meta["val"].dtype
        device = site.product.meta["val"].device
        ones = out.call(aten.full.default, [chunk], 1.0, dtype=computed, device=device)
        # A tensor that is there, so that products with it stay products.
        made = out.call(aten.full.default, [1, chunk], 1.0, dtype=self.factor, device=device)
        row = out.call(aten.narrow_copy.default, made, 1, 0, chunk)
        dxs: list[fx.Node] = []
        sums: dict[str, fx.Node] = {}
        for x, operand, target in zip(xs, summed, targets, strict=True):
            bias = () if site.bias is None else (site.bias,)
            logits = out.call(aten.addmm.default if bias else aten.mm.default, *bias, x, site.weight)
            logits.meta["mlc_note"] = self.note(chunk)
            z = out.cast(logits, computed)
            lp = out.call(aten._log_softmax.default, z, 1, False)
            loss = out.call(aten.nll_loss_forward.default, lp, target, None, _NONE, site.ignore)
            losses = out.call(aten.unsqueeze.default, out.call(operator.getitem, loss, 0), 1)
            self.accumulate(sums, "loss", row, losses)
            if site.gradient is None:
                continue
            count = out.cast(total, computed)
            d = out.call(aten.nll_loss_backward.default, ones, lp, target, None, _NONE, site.ignore, count)
            d = out.cast(out.call(aten._log_softmax_backward_data.default, d, lp, 1, computed), dtype)
            if site.dx:
                dxs.append(out.call(aten.mm.default, d, out.call(aten.t.default, site.weight)))
            d = out.cast(d, self.factor)
            if site.dw:
                self.accumulate(sums, "dw", out.call(aten.t.default, d), operand)
            if site.db:
                self.accumulate(sums, "db", row, d)
        if dxs:
            sums["dx"] = out.call(aten.cat.default, dxs)
        if "dw" in sums and dtype is torch.bfloat16:
            # It has the range of float32, and half the size until the backward.
            sums["dw"] = out.cast(sums["dw"], dtype)
        return sums

    @property
    def factor(self) -> torch.dtype:
        """What the factors of sums over rows are converted to: cuBLAS sums products of half types in float32."""
        value = self.site.product.meta["val"]
        return value.dtype if multiplies_halves(value.device.type) or value.dtype not in _HALVES else self.wide

    def accumulate(self, sums: dict[str, fx.Node], name: str, a: fx.Node, b: fx.Node) -> None:
        """Add a product to a sum, which is float32 for half types, and rounded once as eager's is.

        All that adds is a product itself: additions apart would be fused into one at the end, and what they add of
        every chunk, or its very logits, would be kept until then.
        """
        b = self.out.cast(b, self.factor)
        wide = () if a.meta["val"].dtype is self.wide or a.meta["val"].dtype not in _HALVES else (self.wide,)
        if name in sums:
            op = aten.addmm.dtype if wide else aten.addmm.default
            sums[name] = self.out.call(op, sums[name], a, b, *wide)
        else:
            sums[name] = self.out.call(aten.mm.dtype if wide else aten.mm.default, a, b, *wide)

    def scale(self, gradients: dict[str, fx.Node], total: fx.Node, size: Any) -> None:
        """Each gradient times the factor of the loss (over the rows that counted), where the gradient was."""
        site, out = self.site, self.out
        assert site.gradient is not None
        first = min((g.node for g in (*site.dx, *site.dw, *site.db)), key=out.position)
        with self.graph.inserting_before(first):
            factor = out.cast(site.gradient, self.wide)
            if site.reduction == _MEAN:
                # No row counted: the loss is NaN, but no gradient reaches a row.
                none = out.call(aten.eq.Scalar, total, 0)
                zero = out.call(aten.full.default, [], 0.0, dtype=self.wide, device=total.meta["val"].device)
                factor = out.call(aten.where.self, none, zero, out.call(aten.div.Tensor, factor, total))
        for name, uses in (("dx", site.dx), ("dw", site.dw), ("db", site.db)):
            for use in uses:
                with self.graph.inserting_before(use.node):
                    grad = out.call(aten.mul.Tensor, gradients[name], factor)
                    value = use.node.meta["val"]
                    grad = out.cast(grad, value.dtype)
                    if name == "dx":
                        fixed = isinstance(size, int)
                        if not fixed or grad.meta["val"].shape[0] != size:
                            end = size if fixed else out.call(aten.sym_size.int, site.target, 0)
                            grad = out.call(aten.slice.Tensor, grad, 0, 0, end)
                        grad = out.replay(use.row_maps, grad, site.classes, site.features)
                    if use.transposed:
                        grad = out.call(aten.t.default, grad)
                    if name == "db":
                        grad = out.reshape(grad, use.node)
                    if use.transposed:
                        grad = out.call(aten.clone.default, grad, memory_format=torch.contiguous_format)
                out.replace(use.node, grad)

    def note(self, chunk: Any) -> str:
        value = self.site.product.meta["val"]
        rows = chunk if isinstance(chunk, int) else hint_of(chunk.meta["val"])
        size = rows * self.site.classes * value.element_size() / (1 << 20)
        whole = hint_of(value.shape[0]) * self.site.classes * value.element_size() / (1 << 20)
        return f"loss in {self.count} chunks of {rows} rows: logits take {size:.3g} MiB of {whole:.3g} MiB at a time"
