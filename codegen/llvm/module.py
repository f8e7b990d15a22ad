"""One kernel as an LLVM module: the exported entry, the function that does the work, and one function a parallel loop.

The entry is ``void name(i64* arguments)``: pointers, then sizes, as in ``KernelSource``. One array argument makes the
call from Python one C call whatever the number of arguments, and lets a native host program fill it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import flops
from ...ir.nest.hints import GRAIN
from ...ir.nest.loops import Block, Loop, LoopKind, LoopNest, Update, blocks, walk_nodes
from ...ir.target import Target
from ..kernel import KernelSource, refuse_foreign
from .loops import Nest, emit_nodes, run_loop
from .memory.bounds import has_checks, report
from .memory.compact import LocalStorage, storage_of
from .memory.index import scalar_index
from .memory.scatter import REPORT, is_checked
from .reductions.accumulators import reductions_of
from .reductions.widths import with_whole_registers
from .table import DECLARATIONS, size_function, table_driver
from .text.builder import Builder, Val, element_type
from .text.context import SLACK, STATUS, BufferPlace, Context
from .text.types import memory_type

I64 = DType.INT64
# Larger scratch comes from malloc: a thread of OpenMP may have a stack of 2 MiB, or less.
_STACK_BYTES = 64 << 10
# Operations on elements below which waking a team costs more than it saves.
_ATTRIBUTES = "nounwind"


def emit_llvm(nest: LoopNest, target: Target) -> KernelSource:
    """LLVM IR of a scheduled nest for a CPU target.

    Raises: EmitError for what has no code on a CPU (complex values, GPU bindings and hints, a parallel reduction).
    """
    refuse_foreign(nest, "cpu")
    nest = with_whole_registers(nest, target)
    module = _Module(nest, target)
    is_table = nest.table
    text = module.table_text() if is_table else module.text()
    symbols = tuple(s.name for s in nest.symbols.symbols)
    return KernelSource(
        nest.name, "llvm", text, nest.params, symbols, meta=(("abi", "table" if is_table else "array"),)
    )


@dataclass(slots=True)
class _Module:
    nest: LoopNest
    target: Target
    functions: list[str] = field(default_factory=list)
    declarations: dict[str, str] = field(default_factory=dict)
    regions: int = 0

    def text(self) -> str:
        storage = storage_of(self.nest)
        features = self.features()
        names = [f"%{p.name}" for p in self.nest.params] + [f"%{s.name}" for s in self.nest.symbols.symbols]
        types = ["ptr noalias nofree"] * len(self.nest.params) + ["i64"] * len(self.nest.symbols.symbols)
        # Regions have functions of their own; without any, the work is one, for parameters may be declared not to
        # overlap.
        apart = not any(isinstance(n, Loop) and n.kind is LoopKind.PARALLEL for n, _ in walk_nodes(self.nest.body))
        status = self.tells
        passed = [f"{t} {n}" for t, n in zip(types, names, strict=True)] + [f"ptr %{STATUS}"] * status
        signature = ", ".join(passed)
        entry = _entry(self.nest, names, types, call=apart, status=status)
        if apart:
            b = Builder(f"define internal void @{self.nest.name}.main({signature})", features, self.sleef)
        else:
            b = Builder(entry[0].removesuffix(" #0 {"), features, self.sleef)
            b.lines.extend(entry[2:])
        places = {p.name: _parameter(self.nest, p.name) for p in self.nest.params}
        if status:
            places[STATUS] = BufferPlace(f"%{STATUS}", I64, (), (), fixed=True)
            self.functions.append(REPORT)
        ctx = Context(self.nest, self.target, b, places, {s: Val(f"%{s.name}", I64) for s in self.nest.symbols.symbols})
        paths = {n.name: (n, outer) for n, outer in blocks(self.nest)}
        reduced = reductions_of(paths)

        def region(inner: Context, loop: Loop) -> None:
            _region(self, inner, loop, Nest(reduced), storage)

        heap = _allocate(ctx, [s for s in storage.values() if s.region is None])
        emit_nodes(ctx, Nest(reduced, region), self.nest.body)
        _release(ctx, heap)
        report(ctx)
        b.line("ret void")
        self.add(b)
        return self.whole(["\n".join(entry)] if apart else [])

    def table_text(self) -> str:
        """The kernel over a table: what a row does between two of its iterations, and the driver around it.

        The iterations are those of the parallel loop around everything; without one a row is done at once.
        """
        nest, storage = self.nest, storage_of(self.nest)
        features = self.features()
        loop = nest.body[0] if len(nest.body) == 1 else None
        cut = isinstance(loop, Loop) and loop.kind is LoopKind.PARALLEL
        parameters = [f"ptr noalias nofree %{p.name}" for p in nest.params]
        parameters += [f"i64 %{s.name}" for s in nest.symbols.symbols]
        parameters += [f"ptr %{STATUS}"] * self.tells
        signature = ", ".join([*parameters, "i64 %low", "i64 %high"])
        b = Builder(f"define internal void @{nest.name}.part({signature})", features, self.sleef)
        places = {p.name: _parameter(nest, p.name) for p in nest.params}
        if self.tells:
            places[STATUS] = BufferPlace(f"%{STATUS}", I64, (), (), fixed=True)
            self.functions.append(REPORT)
        ctx = Context(nest, self.target, b, places, {s: Val(f"%{s.name}", I64) for s in nest.symbols.symbols})
        inside = Nest(reductions_of({n.name: (n, outer) for n, outer in blocks(nest)}))
        heap = _allocate(ctx, list(storage.values()))
        extent, work = sympy.S.One, _work(nest.body)
        if cut and isinstance(loop, Loop):
            extent = loop.extent
            run_loop(ctx, inside, loop, Val("%low", I64), Val("%high", I64))
        else:
            emit_nodes(ctx, inside, nest.body)
        _release(ctx, heap)
        report(ctx)
        b.line("ret void")
        self.add(b)
        for name, value in (("extent", extent), ("work", work)):
            text, declarations = size_function(nest, self.target, f"{nest.name}.{name}", value, features)
            self.functions.append(text)
            self.declarations.update(declarations)
        self.declarations.update(DECLARATIONS)
        return self.whole([table_driver(nest, self.target, GRAIN.default, STATUS if self.tells else "")])

    @property
    def tells(self) -> bool:
        """Whether the kernel may meet an index that is out of range."""
        return is_checked(self.nest) or has_checks(self.nest)

    @property
    def sleef(self) -> bool:
        """Whether vectors may be given to Sleef, which torch carries."""
        return bool(self.target.libraries)

    def features(self) -> frozenset[str]:
        return frozenset(f[1:] for f in self.target.features.split(",") if f.startswith("+"))

    def whole(self, entry: list[str]) -> str:
        """The module: its functions, what they declare, and the entry."""
        return "\n\n".join([
            f'; {self.nest.name} for {self.target.arch}',
            "@mlc_zero = internal constant [16 x i8] zeroinitializer, align 16",
            *self.functions,
            *entry,
            "\n".join(self.declarations.values()),
            f'attributes #0 = {{ {_ATTRIBUTES} "prefer-vector-width"="{self.target.vector_bytes * 8}" }}',
            "!0 = !{}",
            "",
        ])  # fmt: skip

    def add(self, b: Builder) -> None:
        if self.regions:
            self.declarations["omp_get_thread_num"] = "declare i32 @omp_get_thread_num() nounwind"
            self.declarations["omp_get_num_threads"] = "declare i32 @omp_get_num_threads() nounwind"
        self.functions.append(b.text("#0 "))
        self.declarations.update(b.declarations)


def _parameter(nest: LoopNest, name: str) -> BufferPlace:
    p = nest.buffer(name)
    element_type(p.dtype)
    return BufferPlace(f"%{name}", p.dtype, p.shape, p.strides, fixed=name not in nest.outputs)


def _entry(nest: LoopNest, names: list[str], types: list[str], call: bool, status: bool) -> list[str]:
    """The exported function: its head and the loads of its arguments.

    And with ``call`` a call of the one that does the work. ``status``: what lies behind the arguments has a name too.
    """
    lines = [f"define void @{nest.name}(ptr %arguments) #0 {{", "entry:"]
    for k, (name, kind) in enumerate(zip(names, types, strict=True)):
        short = kind.split()[0]
        lines.append(f"  %at{k} = getelementptr inbounds i64, ptr %arguments, i64 {k}")
        lines.append(f"  {name} = load {short}, ptr %at{k}, align 8")
    if status:
        lines.append(f"  %{STATUS} = getelementptr inbounds i64, ptr %arguments, i64 {len(names)}")
    if not call:
        return lines
    passed = ", ".join(
        [*(f"{t.split()[0]} {n}" for t, n in zip(types, names, strict=True)), *[f"ptr %{STATUS}"] * status]
    )
    return [*lines, f"  call void @{nest.name}.main({passed})", "  ret void", "}"]


# --- storage of the nest's own buffers ------------------------------------------------------------------------------


def _allocate(ctx: Context, storages: list[LocalStorage]) -> list[str]:
    """Give each buffer its place: small ones on the stack, others by malloc; returns what to free."""
    heap: list[str] = []
    budget = _STACK_BYTES
    for s in storages:
        size = s.numel * s.buffer.dtype.itemsize
        if size.is_Integer and int(size) <= budget:
            budget -= int(size)
            count = int(s.numel) + SLACK // s.buffer.dtype.itemsize
            pointer = ctx.b.alloca(f"[{count} x {memory_type(s.buffer.dtype)}]")
        else:
            size_name = scalar_index(ctx, sympy.expand(size) + 64 + SLACK).name
            raw = ctx.b.call("ptr", "malloc", f"i64 {size_name}", pure=False)
            heap.append(raw)
            up = ctx.b.op(f"getelementptr inbounds i8, ptr {raw}, i64 63")
            mask = "call ptr @llvm.ptrmask.p0.i64"
            ctx.b.declarations["llvm.ptrmask.p0.i64"] = "declare ptr @llvm.ptrmask.p0.i64(ptr, i64)"
            pointer = ctx.b.op(f"{mask}(ptr {up}, i64 -64)")
        ctx.places[s.buffer.name] = BufferPlace(pointer, s.buffer.dtype, s.buffer.shape, s.strides, s.shift, own=True)
    return heap


def _release(ctx: Context, heap: list[str]) -> None:
    for raw in heap:
        ctx.b.call("void", "free", f"ptr {raw}", pure=False)


# --- parallel loops ---------------------------------------------------------------------------------------------------


def _region(module: _Module, ctx: Context, loop: Loop, nest: Nest, storage: dict[str, LocalStorage]) -> None:
    """The loop as a function of a range of iterations, called with the whole range or by each member of a team."""
    name = f"{module.nest.name}.{module.regions}"
    module.regions += 1
    shared = {n: p for n, p in ctx.places.items()}
    places = {n: _renamed(p, f"%{n}") for n, p in shared.items()}
    indices = {s: Val(f"%x{k}", I64) for k, s in enumerate(ctx.indices)}
    parameters = [f"ptr noalias nofree {p.pointer}" for p in places.values()] + [
        f"i64 {v.name}" for v in indices.values()
    ]
    signature = ", ".join([*parameters, "i64 %low", "i64 %high"])
    b = Builder(f"define internal void @{name}({signature})", ctx.b.features, ctx.b.sleef)
    inner = Context(ctx.nest, ctx.target, b, places, dict(indices), dict(ctx.extents), assumed=ctx.assumed)
    heap = _allocate(inner, [s for s in storage.values() if s.region == loop.var])
    run_loop(inner, nest, loop, Val("%low", I64), Val("%high", I64))
    _release(inner, heap)
    report(inner)
    b.line("ret void")
    module.add(b)

    extent = scalar_index(ctx, sympy.expand(loop.extent))
    arguments = [f"ptr {p.pointer}" for p in shared.values()] + [f"i64 {v.name}" for v in ctx.indices.values()]
    module.functions.append(_member(name, [a.split()[0] for a in arguments]))
    _call_team(ctx, loop, name, arguments, extent)
    ctx.touch()


def _renamed(place: BufferPlace, pointer: str) -> BufferPlace:
    return BufferPlace(pointer, place.dtype, place.shape, place.strides, place.shift, place.fixed, place.own)


def _call_team(ctx: Context, loop: Loop, name: str, arguments: list[str], extent: Val) -> None:
    b = ctx.b
    grain = GRAIN.of(loop)
    work = scalar_index(ctx, sympy.expand(_work(loop.body) * loop.extent))
    passed = ", ".join(arguments)
    alone, team, done = b.fresh("alone"), b.fresh("team"), b.fresh("joined")
    large = b.binary("icmp sge", work, Val(str(grain), I64), DType.BOOL)
    if ctx.target.cores == 1:
        large = Val("false", DType.BOOL)
    b.line(f"br {large}, label {team}, label {alone}")
    b.label(alone)
    b.line(f"call void @{name}({passed}, i64 0, i64 {extent.name})")
    b.branch(done)
    b.label(team)
    data = b.alloca(f"[{len(arguments) + 1} x i64]")
    for k, argument in enumerate([*arguments, f"i64 {extent.name}"]):
        at = b.effect(f"getelementptr inbounds i64, ptr {data}, i64 {k}")
        b.line(f"store {argument}, ptr {at}, align 8")
    # Zero threads: OpenMP's own number, which torch.set_num_threads sets.
    b.call("void", "GOMP_parallel", f"ptr @{name}.member", f"ptr {data}", "i32 0", "i32 0", pure=False)
    b.branch(done)
    b.label(done)


def _member(name: str, types: list[str]) -> str:
    """What one thread of the team runs: its share of the range, in one piece."""
    lines = [f"define internal void @{name}.member(ptr %data) #0 {{", "entry:"]
    for k, kind in enumerate([*types, "i64"]):
        lines.append(f"  %at{k} = getelementptr inbounds i64, ptr %data, i64 {k}")
        lines.append(f"  %a{k} = load {kind}, ptr %at{k}, align 8")
    passed = ", ".join(f"{t} %a{k}" for k, t in enumerate(types))
    count = f"%a{len(types)}"
    return "\n".join([
        *lines,
        "  %id32 = call i32 @omp_get_thread_num()",
        "  %threads32 = call i32 @omp_get_num_threads()",
        "  %id = zext i32 %id32 to i64",
        "  %threads = zext i32 %threads32 to i64",
        "  %most = sub nuw i64 %threads, 1",
        f"  %padded = add nuw i64 {count}, %most",
        "  %share = udiv i64 %padded, %threads",
        "  %low = mul nuw i64 %id, %share",
        "  %until = add nuw i64 %low, %share",
        f"  %past = icmp ugt i64 %until, {count}",
        f"  %high = select i1 %past, i64 {count}, i64 %until",
        f"  call void @{name}({passed}, i64 %low, i64 %high)",
        "  ret void",
        "}",
    ])  # fmt: skip


def _work(body: tuple[Loop | Block, ...]) -> sympy.Expr:
    """Operations of one run of some loops, roughly: a load or store counts as one."""
    total: sympy.Expr = sympy.S.Zero
    for node, outer in walk_nodes(body):
        if isinstance(node, Block):
            cost = sum(sum(map(flops, s.values if isinstance(s, Update) else (s.value,))) + 1 for s in node.body) + len(
                node.reads
            )
            total += cost * sympy.Mul(*(lp.extent for lp in outer))
    return total
