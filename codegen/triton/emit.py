"""A scheduled nest as the source of one Triton kernel.

Loops bound to ``blockIdx`` are program ids; loops bound to ``threadIdx.x`` are the axes of the program's tile, one
dimension of the tile for each depth of nesting; the others are loops. A block is written once, for all lanes of the
tile.
"""

from __future__ import annotations

import re

import sympy
from torch.utils._sympy.functions import FloorDiv

from ...ir.nest.hints import (
    DATA_ENDS,
    EARLY,
    FLATTEN,
    FULL_TILES,
    NARROW_ROWS,
    NUM_STAGES,
    NUM_WARPS,
    PEEL,
    RESIDENT,
    WARP_SPECIALIZE,
)
from ...ir.nest.loops import Block, Loop, LoopKind, LoopNest, Node, Scope, Update, walk_nodes
from ...ir.target import Target
from ..kernel import NARROW, WIDE, EmitError, KernelSource, refuse_foreign
from .draws import Draws
from .helpers import helpers_for
from .loops.data_ends import end_of, live_ends
from .loops.full_tiles import full_tiles
from .loops.limits import Limits, take_limits
from .loops.states import begin_states
from .packed.pairs import Pairs
from .packed.parts import Parts, WrittenIteration
from .packed.positions import Positions
from .products.column_parts import ColumnParts
from .products.descriptors import Descriptors
from .products.places import load_places
from .program import BlockInfo, TritonProgram
from .reach import reach_of
from .reduce import Reductions
from .scans import Scans
from .scatter import scatter
from .table import ALIGNED, PARAMETERS, table_head
from .values import Values
from .writer import SourceWriter

# Hints of loops that Triton's ``range`` takes.
LOOP_FLAGS = (FLATTEN, WARP_SPECIALIZE)
# Loops of a program.
_IN_ORDER = (LoopKind.SERIAL, LoopKind.UNROLLED)
_HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"


def emit_triton(nest: LoopNest, target: Target) -> KernelSource:
    """The Triton source of a scheduled nest for a GPU target.

    The kernel takes ``<name>_ptr`` for each parameter, of bytes where the target's Triton lacks the type, then the size
    symbols, all of one integer type (``option("index")``), in which indices are computed: 32 bits where they suffice at
    all sizes, and in the first form of a text that has two (``KernelSource.reach``). It takes the hints that
    ``ir.nest.hints`` has for GPUs. Raises EmitError, which says what schedule would do.
    """
    if not target.is_gpu:
        raise EmitError(f"{target} is no GPU; Triton kernels are for cuda and hip")
    refuse_foreign(nest, "gpu")
    return _TritonEmitter(nest, target).source()


class _TritonEmitter:
    def __init__(self, nest: LoopNest, target: Target) -> None:
        self.nest = nest
        self.target = target
        self.program = TritonProgram(nest, target)
        self.limits = take_limits(self.program)
        self.out = SourceWriter()
        self.values = Values(self.program, self.out)
        self.reductions = Reductions(self.values, self.out)
        self.descriptors = Descriptors(self.values, self.out)
        self.parts = Parts(self.values, self.out)
        self.values.tile_load = lambda b, e: self.descriptors.load(b, e) or self.parts.load(b, e)
        self.pairs = Pairs(self.values, self.parts.word, target)
        self.values.tile_cast = self.pairs.cast
        self.values.tile_position = Positions(self.values, self.out, target.has_pairs).value
        self.values.tile_draw = Draws(self.values, self.out).draw
        self.scans = Scans(self.values, self.out, self.reductions)
        self.columns = ColumnParts(self.program, self.values, self.out)

    def source(self) -> KernelSource:
        for b in self.nest.locals:
            if b.scope is Scope.GLOBAL:
                raise EmitError(
                    f"{b.name} is a workspace in memory, which a kernel on a GPU does not get; make it an output, or "
                    'set_scope(…, "local")'
                )
        name = re.sub(r"\W", "_", self.nest.name)
        symbols = tuple(s.name for s in self.nest.symbols.symbols)
        table = self.nest.table
        parameters = list(PARAMETERS) if table else [*(f"{b.name}_ptr" for b in self.nest.params), *symbols]
        self._program_ids()
        self._tile_axes()
        self.out.end_head()
        self.descriptors.declare()
        self._body()
        body = "\n".join(self.out.lines) or "    pass"
        helpers = "".join(self.out.helpers.values())
        reach = self._reach()
        integer = "" if self.program.integer != "INDEX" else WIDE if reach is None else NARROW
        text = f"{_HEAD}{integer}{ALIGNED if table else ''}{helpers_for(body + helpers, self.target)}{helpers}"
        text += f"\n\n@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n"
        grid, meta = tuple(self.program.grid), self._meta(narrow=reach is not None)
        params = tuple(map(self.program.types.in_memory, self.nest.params))
        return KernelSource(name, "triton", text, params, symbols, grid, meta, reach)

    def _reach(self) -> sympy.Expr | None:
        """How far indices reach, where that decides their type."""
        if self.program.integer != "INDEX":
            return None
        found = [*self.program.indices(), *self.program.loops.values(), *self.program.grid]
        found += [rhs for i in self.program.infos.values() for _, rhs in i.bounds]
        # Two rounds, since what a variable stands for may have another one in it.
        written = [e.xreplace(self.values.meaning).xreplace(self.values.meaning) for e in self.values.indices]
        return reach_of([*found, *written], self.program.ranges)

    def _meta(self, narrow: bool) -> tuple[tuple[str, int | str | bool], ...]:
        divisors = [(f"divisor:{s.symbol.name}", s.divisor) for s in self.nest.symbols.sizes if s.divisor > 1]
        return (
            ("index", "i64" if self.program.wide and not narrow else "i32"),
            ("num_warps", NUM_WARPS.of(self.nest)),
            ("num_stages", NUM_STAGES.of(self.nest)),
            ("enable_fp_fusion", True),
            *((("maxnreg", share),) if (share := self._share()) else ()),
            *((("warp_specialize", True),) if self._specializes() else ()),
            *((("descriptors", ",".join(self.descriptors.buffers)),) if self.descriptors.buffers else ()),
            *((("table", True),) if self.nest.table else ()),
            *divisors,
        )

    def _share(self) -> int:
        """The most registers of a thread; 0 where the compiler is not told."""
        programs, machine = RESIDENT.of(self.nest), self.target.machine
        if not programs or self.target.kind != "cuda":
            return 0
        each = machine.registers // (programs * NUM_WARPS.of(self.nest) * self.target.warp)
        return min(each // machine.step * machine.step, machine.thread_registers)

    def _specializes(self) -> bool:
        loops = (n for n, _ in walk_nodes(self.nest.body) if isinstance(n, Loop))
        return any(WARP_SPECIALIZE.of(lp) for lp in loops)

    # --- the head -----------------------------------------------------------------------------------------------------

    def _program_ids(self) -> None:
        used = {s.name for e in self.program.loops.values() for s in e.free_symbols}
        if self.nest.table:
            axes = "".join(axis for axis in "xyz" if f"pid_{axis}" in used)
            for line in table_head(self.nest, axes, self.program.integer, self.program.types):
                self.out.line(line)
            return
        for k, axis in enumerate("xyz"):
            if f"pid_{axis}" in used:
                wide = f".to({self.program.integer})" if self.program.wide else ""
                self.out.line(f"pid_{axis} = tl.program_id({k}){wide}")

    def _tile_axes(self) -> None:
        for axis, (dim, extent) in self.program.tile.items():
            self.out.line(self.program.axis_text(axis, dim, extent))

    # --- the body -----------------------------------------------------------------------------------------------------

    def _body(self) -> None:
        full = self._full_programs()
        if full is None:
            self._nodes(self.nest.body)
            return
        pid, count = full
        self.out.line(f"if {pid.name} < {self.values.index(count)}:  # no tail in this program")
        before = self.program.ranges.extents[pid]
        self.program.ranges.loop(pid, count)
        self._branch()
        self.program.ranges.loop(pid, before)
        self.out.line("else:")
        self._branch()

    def _branch(self) -> None:
        with self.out.scope():
            self._nodes(self.nest.body)
        self.values.tiles.clear()
        self.values.apart.clear()
        self.values.stored.clear()

    def _full_programs(self) -> tuple[sympy.Symbol, sympy.Expr] | None:
        """How many programs of a one-dimensional grid no tail touches, where the nest asks for a path of their own."""
        if not PEEL.of(self.nest) or len(self.program.grid) != 1:
            return None
        pid = next((e for e in self.program.loops.values() if e.is_Symbol and e.name == "pid_x"), None)
        tails = {b for i in self.program.infos.values() for b in i.bounds if not self.program.ranges.below(*b)}
        if pid is None or not tails:
            return None
        counts = set()
        for lhs, rhs in tails:
            step = sympy.expand(lhs).coeff(pid)
            if not step.is_Integer or step <= 0 or pid in rhs.free_symbols:
                return None
            counts.add(FloorDiv(rhs, step))
        if len(counts) != 1:
            return None
        count = counts.pop()
        return (pid, count) if count != 0 else None

    def _nodes(self, nodes: tuple[Node, ...]) -> None:
        whole = self.columns.following(nodes)
        for node in nodes[:whole]:
            if isinstance(node, Block):
                self._block(self.program.infos[node.name])
            else:
                self._loop(node)
        if whole < len(nodes):
            self.columns.write(nodes[whole:], self._block)

    def _loop(self, loop: Loop) -> None:
        self.values.open.append(loop.var)
        var = self.program.loops[loop.var]
        if loop.kind in (LoopKind.SERIAL, LoopKind.UNROLLED) and var.is_Symbol:
            self._serial(loop, var)
        else:
            if all(lp.kind not in _IN_ORDER for lp, _ in walk_nodes((loop,)) if isinstance(lp, Loop)):
                self._load_early(loop)
            self._nodes(loop.body)
        self.values.open.pop()

    def _load_early(self, loop: Loop) -> None:
        """What blocks of a program without loops load of parameters that are asked for early."""
        names = {b.name for b in self.nest.params if EARLY.of(self.nest, b.name)}
        inside = (n for n, _ in walk_nodes((loop,)) if isinstance(n, Block)) if names else ()
        for block in inside:
            for ld in dict.fromkeys(ld for ld in block.reads if ld.buffer in names):
                self.values.enter(self.program.infos[block.name])
                if self.values.in_range(ld):
                    self.values.value(ld)

    def _serial(self, loop: Loop, var: sympy.Symbol) -> None:
        inside = [self.program.infos[n.name] for n, _ in walk_nodes(loop.body) if isinstance(n, Block)]
        carried = [i for info in inside if self._starts(info, var) for i in self._copies(loop, info)]
        for info in carried:
            self.reductions.begin(info)
        scanning = [i for i in inside if self.scans.starts(i, var)]
        for info in scanning:
            self.scans.begin(info)
        begin_states(self.values, self.out, inside, var)
        for name in {a.buffer for i in inside for a in i.block.writes if _is_global(self.program, a.buffer)}:
            self.out.forget(name)
        if self._is_written_out(loop, inside):
            self.values.visit = set() if self._is_narrow() else None
            self._written_out(loop, var, inside)
        else:
            self._looped(loop, var, inside)
        for info in scanning:
            self.scans.end(info)
        for info in carried:
            self.values.enter(info, ended=True)
            self.reductions.end(info)

    def _is_written_out(self, loop: Loop, inside: list[BlockInfo]) -> bool:
        apart = loop.kind is LoopKind.UNROLLED and bool(loop.extent.is_Integer) and all(i.operands for i in inside)
        return apart or self.program.is_apart(loop)

    def _is_narrow(self) -> bool:
        """Whether what a visit of a row loads is kept as it is. Raises EmitError where a program's third number, by
        which that is done, is not zero."""
        if len(self.program.grid) > 2:
            raise EmitError("rows are kept narrow in programs of one or two numbers; fuse the loops bound to blockIdx")
        return NARROW_ROWS.of(self.nest) and self.target.kind == "cuda"

    def _copies(self, loop: Loop, info: BlockInfo) -> list[BlockInfo]:
        """The copies of a block in a loop that have results of their own."""
        found = [info]
        for inner, _ in walk_nodes(loop.body):
            if not isinstance(inner, Loop):
                continue
            var = self.program.loops[inner.var]
            inside = [self.program.infos[n.name] for n, _ in walk_nodes(inner.body) if isinstance(n, Block)]
            around = any(i.block is info.block for i in inside) and var.is_Symbol
            if around and self._is_written_out(inner, inside) and var not in info.reduced_serial:
                found = [i.at(var, sympy.Integer(k)) for i in found for k in range(int(inner.extent))]
        return found

    def _written_out(self, loop: Loop, var: sympy.Symbol, inside: list[BlockInfo]) -> None:
        """A copy of the body for each iteration: what they read alike is loaded once, and what depends on the
        iteration alone is decided here."""
        infos, outside, count = self.program.infos, self.parts.iteration, int(loop.extent)
        for k in range(count):
            self.parts.iteration = WrittenIteration(var, count, k, infos, outside)
            self.program.infos = infos | {i.block.name: i.at(var, sympy.Integer(k)) for i in inside}
            self._nodes(loop.body)
        self.program.infos, self.parts.iteration = infos, outside

    def _looped(self, loop: Loop, var: sympy.Symbol, inside: list[BlockInfo]) -> None:
        if loop.kind is LoopKind.UNROLLED:
            if not loop.extent.is_Integer:
                raise EmitError(f"loop {loop.var} is unrolled and runs {loop.extent} times; unroll a constant extent")
            self._iterations(loop, var, f"tl.static_range({self.values.index(loop.extent)})")
            return
        limits = self.limits.get(loop.var, Limits())
        within = [n for n, _ in walk_nodes((loop,)) if isinstance(n, Loop) and n.kind in _IN_ORDER]
        load_places(self.values, inside, {s for n in within for s in self.program.loops[n.var].free_symbols})
        low, high = self._ends("0", self.values.index(loop.extent), limits)
        low, high = live_ends(self.values, self.out, loop, low, high)
        if DATA_ENDS.of(loop):
            high = end_of(self.values, self.out, inside, var, high)
        full = full_tiles(self.values, loop, limits) if FULL_TILES.of(loop) else None
        if full is None:
            self._iterations(loop, var, self._range(loop, low, high))
            return
        first, last = self._ends(low, high, full.limits)
        if full.limits.low:
            first = self.out.assign("first", f"tl.minimum({first}, {high})")
        last = self.out.assign("last", f"tl.maximum({last}, {first})")
        self.values.facts = full.facts
        self._iterations(loop, var, self._range(loop, first, last))
        self.values.facts = ()
        if not full.limits.low:
            self._iterations(loop, var, self._range(loop, last, high))
        elif not full.limits.high:
            self._iterations(loop, var, self._range(loop, low, first))
        else:  # at both ends
            before = self.out.assign("before", f"{first} - {low}")
            place = f"tl.where({{at}} < {before}, {low}, {last} - {before}) + {{at}}"
            self._iterations(loop, var, self._range(loop, "0", f"{before} + {high} - {last}"), place)

    def _iterations(self, loop: Loop, var: sympy.Symbol, over: str, place: str = "") -> None:
        """A loop and its body; ``place`` is which iteration of the nest's loop one is, in terms of its number ``at``
        where that differs."""
        wide = self.program.wide and not loop.extent.free_symbols and loop.kind is LoopKind.SERIAL
        at = f"{var.name}_" if wide or place else var.name
        self.out.line(f"for {at} in {over}:")
        self.values.serial.append(loop.var)
        with self.out.scope():
            if wide or place:
                text = place.format(at=at) or at
                self.out.line(f"{var.name} = " + (f"tl.cast({text}, {self.program.integer})" if wide else text))
            self._nodes(loop.body)
        self.values.serial.pop()

    def _range(self, loop: Loop, low: str, high: str) -> str:
        stages = NUM_STAGES.found(loop)
        more = f", num_stages={stages}" if stages else ""
        more += "".join(f", {hint.name}=True" for hint in LOOP_FLAGS if hint.of(loop))
        return f"tl.range({low}, {high}{more})"

    def _ends(self, low: str, high: str, limits: Limits) -> tuple[str, str]:
        """From where to where a loop runs that would run from ``low`` to ``high``."""
        for limit in limits.low:
            low = self.out.assign(
                "low", f"tl.maximum(tl.cast({self.values.index(limit)}, {self.program.integer}), {low})"
            )
        for limit in limits.high:
            high = self.out.assign(
                "high", f"tl.minimum(tl.cast({self.values.index(limit)}, {self.program.integer}), {high})"
            )
        return low, high

    def _starts(self, info: BlockInfo, var: sympy.Symbol) -> bool:
        """Whether this loop is the outermost that carries the block's reduction."""
        name, copy = info.place
        begun = any(n == name and of[: len(copy)] == copy for n, of in self.reductions.open)
        return info.block.is_reduction and var in info.reduced_serial and not begun

    def _block(self, info: BlockInfo) -> None:
        self.out.comment(info.block.name)
        self.values.enter(info)
        for statement in info.block.body:
            if info.block.is_scatter:
                scatter(self.values, self.out, info, statement)
            elif isinstance(statement, Update):
                (self.scans if info.block.is_scan else self.reductions).step(info, statement)
            else:
                buffer = self.program.buffers[statement.buffer]
                self.values.store_changed(buffer, statement)
        if info.block.is_scan:
            self.scans.leave(info)


def _is_global(program: TritonProgram, name: str) -> bool:
    return program.buffers[name].scope is Scope.GLOBAL
