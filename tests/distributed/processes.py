"""Programs that several processes run on gloo, each compiled and in eager: one raises where the two differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

from torch_mlc.runtime.counters import counters as ours

PROGRAMS: dict[str, Callable[[], None]] = {}


def program(fn: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[fn.__name__] = fn
    return fn


def compiled(fn: Any, **how: Any) -> Any:
    return torch.compile(fn, backend="mlc", **how)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@contextmanager
def compiling(least: int = 1) -> Iterator[None]:
    """What happens inside is compiled, and by us."""
    before = ours.snapshot()
    yield
    since = ours.since(before)
    assert since.get("graphs_compiled", 0) + since.get("graph_cache_hits", 0) >= least, since


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 32), nn.Linear(32, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


def data(seed: int, *shape: int) -> Tensor:
    """Other numbers in each process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 100 + dist.get_rank()))


# --- collectives in the graph -----------------------------------------------------------------------------------------


@program
def collectives() -> None:
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size()

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = funcol.all_reduce(x.exp(), "sum", group)
        rows = funcol.all_gather_tensor(y * 2, 0, group)
        columns = funcol.all_gather_tensor(y, 1, group)
        busy = torch.softmax(x @ y, -1)
        part = funcol.reduce_scatter_tensor((rows * 3).contiguous(), "avg", 0, group)
        most = funcol.all_reduce(busy.t(), "max", group)
        around = funcol.all_to_all_single(y.contiguous(), None, None, group)
        return busy + total, rows.sum(0), columns.relu(), part - y, most.cumsum(0), around * 2

    run = compiled(f, fullgraph=True)
    with compiling():
        for seed in range(3):
            x, y = data(seed, 4 * size, 4 * size), data(seed + 9, 4 * size, 4 * size)
            close(run(x, y), tuple(t + 0 for t in f(x, y)))


@program
def collectives_over_what_is_written() -> None:
    """The operand's memory would be free for the next kernel, were nobody still sending it."""
    group = dist.group.WORLD
    assert group is not None

    def f(x: Tensor, w: Tensor, p: Tensor, copied: bool = False) -> tuple[Tensor, ...]:
        h = x @ w
        everything = funcol.all_gather_tensor(h, 0, group)
        g = h.relu() * 1e6
        for _ in range(3):
            g = (g @ w).clamp(-1, 1) * 1e6
        # Eager itself sends what is written next, unless that is a copy.
        old = funcol.all_gather_tensor(p.clone() if copied else p, 0, group)
        p.mul_(-3)
        return g.sum(), everything + 0, old + 0

    run = compiled(f, fullgraph=True)
    for seed in range(4):
        x, w, p = data(seed, 256, 256), data(seed + 1, 256, 256), data(seed + 2, 4096)
        q = p.clone()
        close(run(x, w, p), f(x, w, q, copied=True))
        close(p, q)


@program
def collectives_by_their_usual_names() -> None:
    """``torch.distributed``'s own functions, which Dynamo writes as functional ones."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(y.shape[0] * dist.get_world_size(), *y.shape[1:])
        dist.all_gather_into_tensor(out, y.sin())
        return out.sum(0) + y.mean()

    x = data(1, 6, 5)
    with compiling():
        close(compiled(f, fullgraph=True)(x), f(x))


# --- models -----------------------------------------------------------------------------------------------------------


def trained(run: nn.Module, model: nn.Module, steps: int = 3) -> list[Tensor]:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(steps):
        opt.zero_grad()
        run(data(k, 8, 16)).square().mean().backward()
        opt.step()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in full]


@program
def data_parallel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Model(), Model())
    twin = copy.deepcopy(model)
    # Buckets of little: several graphs, with all-reduces while the backward goes on.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2048
    wrapped, eager = (nn.parallel.DistributedDataParallel(m, bucket_cap_mb=0.003) for m in (model, twin))
    with compiling(2):
        mine = trained(compiled(wrapped), model)
    close(mine, trained(eager, twin))
    gathered = [torch.empty_like(mine[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine[0])
    assert all(torch.equal(g, mine[0]) for g in gathered)


@program
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    results = []
    for how in ("blocks", "model", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(Model(), Model())
        for block in model:
            fully_shard(block)
        fully_shard(model)
        if how == "blocks":
            for block in model:
                block.compile(backend="mlc")
        with compiling(2 if how == "blocks" else 0):  # Dynamo leaves the whole alone where hooks gather
            results.append(trained(compiled(model) if how == "model" else model, model))
    close(results[0], results[2])
    close(results[1], results[2])


@program
def pipeline() -> None:
    """Stages in processes of their own: what each sends is what its compiled stage returns, of one microbatch after
    another, and the backwards of several forwards that are under way come in either order."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    x, target = (torch.randn(4 * world, 16, generator=torch.Generator().manual_seed(k)) for k in range(2))
    torch.manual_seed(0)
    model = nn.Sequential(*(Model() for _ in range(world)))
    twin = copy.deepcopy(model)
    wanted = [F.mse_loss(part, goal) for part, goal in zip(twin(x).chunk(world), target.chunk(world), strict=True)]
    torch.stack(wanted).mean().backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        block = copy.deepcopy(model[rank])
        block.compile(backend="mlc")
        stage = PipelineStage(block, rank, world, torch.device("cpu"))
        run = schedule(stage, n_microbatches=world, loss_fn=F.mse_loss)
        losses: list[Tensor] = []
        with compiling(2 if schedule is ScheduleGPipe else 0):  # the second finds what the first has compiled
            run.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == world - 1 else {}))
        if rank == world - 1:
            close(losses, wanted)
        close([p.grad for p in block.parameters()], [p.grad for p in twin[rank].parameters()])


@program
def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for how in ("compiled", "eager", "alone"):
        torch.manual_seed(0)
        model = Model()
        if how != "alone":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            model = parallelize_module(model, mesh, plan)
        run = compiled(model, fullgraph=True) if how == "compiled" else model
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
        with compiling(2 if how == "compiled" else 0):
            out = run(x)
            out.square().mean().backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        results.append((out.detach(), grads))
    close(results[0], results[1])
    close(results[0], results[2])


@program
def distributed_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def f(a: DTensor, b: DTensor) -> DTensor:
        c = torch.softmax(a @ b, -1).redistribute(mesh, [Replicate()])
        return (c * 2 + a.sum()).redistribute(mesh, [Shard(1)])

    full = [torch.randn(8, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    a, b = distribute_tensor(full[0], mesh, [Shard(0)]), distribute_tensor(full[1], mesh, [Shard(1)])
    run = compiled(f, fullgraph=True)
    with compiling():
        result, eager = run(a, b), f(a, b)
    assert isinstance(result, DTensor) and result.placements == eager.placements
    close(result.full_tensor(), eager.full_tensor())
    leaves = [t.clone().detach().requires_grad_() for t in (a, b)]
    grads = [torch.autograd.grad(fn(*leaves).to_local().sum(), leaves) for fn in (run, f)]
    for x, y in zip(*grads):
        close(x.full_tensor(), y.full_tensor())


# --- processes --------------------------------------------------------------------------------------------------------


def work(rank: int, world: int, store: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        PROGRAMS[name]()
        dist.barrier()
    dist.destroy_process_group()
