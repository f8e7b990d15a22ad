"""A tensor function by ATen ops equals eager, whatever it holds: it stands in for kernels that do not compile."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import torch_mlc
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.runtime.counters import counters

CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "pointwise": lambda x: torch.tanh(x) * 2 + x.clamp(-1, 1).exp() - torch.sigmoid(x).erf(),
    "transposed": lambda x: (x.t() + 1).contiguous(),
    "rows": lambda x: F.softmax(x, -1),
    "columns": lambda x: x.sum(0) / x.amax(0),
    "welford": lambda x: torch.var_mean(x, 1),
    "argmax": lambda x: (x.argmax(1), x.round().argmin(0)),
    "logic": lambda x: ((x > 0).any(1), (x > -9).all(0), torch.where(x > 0, x, -x)),
    "cat and pad": lambda x: F.pad(torch.cat([x, x * 2], 1), (1, 2, 0, 1)).sin(),
    "gather": lambda x: x[torch.tensor([2, 0, 2])] + 1,
    "half": lambda x: (x.bfloat16() * 3).float().cos(),
    "integers": lambda x: ((x * 10).long() // 3, (x * 10).long() % 4, (x * 10).int() << 1),
    "iterations": lambda x: (
        torch.gcd((x * 50).long(), torch.tensor([30, 18, 0, 7, -4, 12])),
        torch.special.legendre_polynomial_p(x.sigmoid().bfloat16().float(), torch.arange(6)),
    ),
    "shapes": lambda x: x.reshape(2, -1).exp().view(-1)[1::2] * torch.arange(3 * x.shape[0], dtype=torch.float32),
    "scatter": lambda x: (
        x.index_add(0, torch.tensor([2, 0, 2]), x[:3] * 2),
        x.scatter_reduce(1, (x[:, :5] * 9).long() % 6, x[:, 1:], "amax"),
        x.index_copy(1, torch.tensor([5, 0]), x[:, :2].cos()),
    ),
    "scans": lambda x: (x.cumsum(1), x.cummax(0), x.flip(1).logcumsumexp(1).flip(1) * x, x[:, :1].cumprod(1)),
    "one row": lambda x: x[:1].sum(),
}


@pytest.fixture(autouse=True)
def no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def failing(nest: object, target: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(kernels, "emit", failing)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:torch-mlc")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_by_aten_ops_equals_eager(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    f, x = CASES[name], torch.randn(4, 6)
    before = counters.snapshot()
    settings = {"strict": False, "cache": False, "numerics": "eager"}
    ours = torch.compile(f, backend="mlc", dynamic=dynamic, options=settings)(x)
    assert counters.since(before)["kernel_fallbacks"] >= 1
    torch.testing.assert_close(ours, f(x))


@pytest.mark.filterwarnings("ignore:torch-mlc")
def test_numbers_of_a_row_are_read_beside_its_features() -> None:
    """The forward of an attention writes a number for each row, made of what is alike for all features."""
    found = []
    settings = {"strict": False, "cache": False}
    for f in (_attention, torch.compile(_attention, backend="mlc", dynamic=False, options=settings)):
        x = torch.linspace(-1, 1, 120).view(2, 12, 5).cos().requires_grad_()
        y = f(x)
        found.append((y, *torch.autograd.grad(y.sin().sum(), x)))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:torch-mlc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_users(dtype: torch.dtype) -> None:
    def doubled(x: torch_mlc.Formula) -> torch_mlc.Formula:
        y = x * x
        return (y + y).sqrt()

    x = torch.linspace(-2, 2, 12, dtype=dtype)
    settings = {"strict": False, "cache": False}
    with (
        torch_mlc.register_intrinsic("doubled", doubled),
        torch_mlc.register_converter("aten.celu", lambda x: x.doubled(), pointwise=True),
    ):
        ours = torch.compile(torch.celu, backend="mlc", options=settings)(x)
    torch.testing.assert_close(ours, (x.float().square() * 2).sqrt().to(dtype))


def _attention(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.filterwarnings("ignore:torch-mlc")
def test_a_reduction_of_one_element_combines_nothing() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return F.pairwise_distance(x, y) @ z

    given = (
        torch.linspace(-1, 1, 32).bfloat16()[None],
        torch.ones(1, 64).bfloat16()[:, ::2],
        torch.ones(1, 4).bfloat16(),
    )
    ours = torch.compile(f, backend="mlc", dynamic=False, options={"strict": False, "cache": False})
    torch.testing.assert_close(ours(*given), f(*given))
