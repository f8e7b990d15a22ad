"""Products of vectors and matrices, decompositions, Fourier transforms, statistics, and complex numbers."""

from __future__ import annotations

import torch

from .maker import Draft, Info, Maker, NoFit


def real(i: Info) -> bool:
    return i.dtype in (torch.float32, torch.float64) and i.within(-30, 30)


def matrices(m: Maker) -> Draft:
    a = m.pick(real, lambda i: i.ndim >= 2 and i.has(-1) and i.has(-2) and i.elements <= 2000)
    n = a.name
    square = f"({n} @ {n}.mT * 0.1 + torch.eye({n}.shape[-2], dtype={n}.dtype) * 4)"
    options = [
        f"torch.linalg.inv({square})",
        f"torch.linalg.det({square} * 0.2)",
        f"torch.linalg.slogdet({square})[1]",
        f"torch.linalg.cholesky({square})",
        f"torch.linalg.solve({square}, {n})",
        f"torch.linalg.matrix_power({square}, 2)",
        f"torch.linalg.matrix_norm({n} + 0.3)",
        f"torch.linalg.vecdot({n}, {n})",
        f"torch.linalg.multi_dot([{n}, {n}.mT, {n}])" if a.ndim == 2 else f"{n} @ {n}.mT @ {n}",
        f"torch.baddbmm({n}, {n} @ {n}.mT, {n}, alpha=0.5)"
        if a.ndim == 3
        else f"torch.einsum('...ij,...kj->...', {n}, {n})",
        f"torch.einsum('...ij->...ji', {n})",
        f"torch.inner({n}, {n})",
        f"torch.tensordot({n}, {n}, ({n}.ndim - 1, {n}.ndim - 1))",
        f"torch.cdist({n}, {n} * 0.5 + 1, p=1.0)",
        f"torch.einsum('...ij,...kl->...il', {n}, {n})",
        f"torch.linalg.diagonal({n}).sum(-1)",
        f"torch.renorm({n}, 2, 0, 1.5)",
    ]
    if a.ndim == 2:
        options += [
            f"torch.trace({n})",
            f"torch.cov({n})",
            f"torch.kron({n}[:2], {n}[:, :2])",
            f"torch.block_diag({n}, {n} * 2)",
            f"F.pdist({n} + torch.arange({n}.shape[0])[:, None] * 3)",
            f"torch.addmv({n}[:, 0], {n}, {n}[0])",
            f"torch.addr({n}, {n}[:, 0], {n}[0], alpha=0.5)",
            f"torch.mv({n}, {n}[0])",
            f"torch.addbmm({n}, {n}[None], torch.eye({n}.shape[1], dtype={n}.dtype)[None])",
            f"torch.tril({n}) @ {n}.mT",
        ]
    return m.choose(options)


def vectors(m: Maker) -> Draft:
    a = m.pick(real, lambda i: i.ndim >= 1 and i.has(-1) and i.has(0))
    n, d = a.name, m.dim(a, least=2)
    options = [
        f"torch.trapezoid({n}, dim={d})",
        f"torch.cumulative_trapezoid({n}, dim={d})",
        f"torch.quantile({n}, 0.3, dim={d})",
        f"torch.nanquantile({n}, 0.5, dim={d})",
        f"torch.nanmedian({n}, {d})[0]",
        f"torch.diff({n}, n=2, dim={d})",
        f"torch.diff({n}, prepend={n}.narrow({d}, 0, 1), dim={d})",
        f"torch.nansum({n}, {d})",
        f"torch.std_mean({n}, {d})[1]",
        f"torch.logsumexp({n}, {tuple(range(a.ndim))})",
        f"torch.linalg.vector_norm({n}, 3, {d})",
        f"torch.var({n}, {d}, correction=2)",
        f"torch.histc({n}.detach().clamp(-2, 2), 4, -2.5, 2.5)" if a.sure else f"{n}.mean({d})",
        f"torch.norm({n}, 0.5, {d}) * 0 + 1",
        f"torch.unflatten({n}.unsqueeze(0), 0, (1, 1))",
        f"F.fold({n}.reshape(1, 1, -1).expand(1, 4, -1)[..., :1], (2, 2), 2)",
        f"F.pixel_shuffle({n}.reshape(1, 1, 1, -1).expand(1, 4, 1, -1), 2)",
        f"torch.renorm({n}[None], 1, 0, 2.0)",
    ]
    if a.ndim == 1:
        options += [
            f"torch.dot({n}, {n})",
            f"torch.cartesian_prod({n}[:3], {n}[:2])",
            f"torch.combinations({n}[:4])",
            f"torch.ger({n}, {n})",
            f"torch.meshgrid({n}, {n}[:2], indexing='ij')[0]",
            f"F.conv1d({n}[None, None], {n}[None, None, :2])",
        ]
    if all(s[-1] == 3 for s in a.shapes):
        options += [f"torch.linalg.cross({n}, {n}.flip(-1))"] * 4
    return m.choose(options)


def transforms(m: Maker) -> Draft:
    a = m.pick(lambda i: real(i) and i.dtype is torch.float32, lambda i: i.ndim >= 1 and i.has(-1, 2))
    n = a.name
    options = (
        f"torch.fft.rfft({n}).real",
        f"torch.fft.irfft(torch.fft.rfft({n}), n={n}.shape[-1])",
        f"torch.fft.fft({n})",
        f"torch.fft.fftshift({n}, -1)",
        f"torch.view_as_real(torch.fft.fft({n}, norm='ortho')) * 0.5",
        f"torch.fft.ifft(torch.fft.fft({n}) * 0.5).real",
    )
    return m.choose(options)


def complex_input(m: Maker) -> Info:
    """A complex tensor that there is, or a new one in the shape of another."""
    if m.chance(0.7):
        try:
            return m.pick(lambda i: i.dtype is torch.complex64)
        except NoFit:
            pass
    return m.fresh(m.pick(lambda i: i.elements <= 2000).shapes, torch.complex64)


COMPLEX = (
    "{a} * 2.5",
    "{a} * (1 + 2j)",
    "{a} / (2 - 1j)",
    "{a} + 1",
    "{a}.conj()",
    "{a} * {a}.conj()",
    "{a}.real * {a}.imag",
    "torch.sin({a} * 0.2)",
    "torch.tanh({a} * 0.1)",
    "torch.sqrt({a} * 0.1 + 3)",
    "torch.log({a} * 0.1 + 3)",
    "{a} ** 2",
    "torch.reciprocal({a} + 9)",
    "{a}.mean()",
    "{a}.sum()",
    "torch.zeros_like({a}) + {a}",
    "torch.where({a}.real > 0, {a}, 0)",
    "torch.view_as_real({a}).sum(-1)",
    "{a}.clone()",
    "{a} == {a}",
    "torch.stack([{a}, {a} * 1j])",
    "-{a}.conj()",
    "{a}.exp() * 0.01",
    "torch.complex({a}.imag, {a}.real)",
    "torch.view_as_complex(torch.view_as_real({a}) * 2)",
    "{a}.reshape(-1)",
    "{a} - {a}.real",
    "torch.resolve_conj({a}.conj())",
    "({a}.abs() + 1).log()",
    "torch.angle({a} + 20)",
    "torch.real({a})",
    "torch.imag({a}) + 1",
    "torch.isfinite({a})",
    "{a} != 0",
    "torch.cos({a} * 0.2)",
    "torch.sgn({a} + 20)",
    "torch.polar({a}.abs(), {a}.real)",
)
COMPLEX_ROWS = (
    "{a}.sum(0)",
    "{a}.mean(-1)",
    "torch.cumsum({a}, 0)",
    "{a}[0]",
    "{a}[..., ::2]",
    "{a}.flip(0)",
    "{a} @ {a}.transpose(-1, -2)",
    "torch.cat([{a}, {a}], 0)",
    "{a}.transpose(0, -1)",
    "torch.linalg.vector_norm({a}, 2, -1)",
    "torch.roll({a}, 1, 0)",
    "torch.fft.ifft({a})",
    "F.pad({a}, (1, 1))",
    "{a}.index_select(0, torch.tensor([0]))",
    "{a}.masked_fill({a}.real > 0, 2)",
    "torch.einsum('...i,...i->...', {a}, {a}.conj())",
    "{a}.mH @ {a}",
    "torch.vdot({a}.reshape(-1), {a}.reshape(-1))",
)


def complexes(m: Maker) -> Draft:
    a = complex_input(m)
    table = COMPLEX_ROWS if a.ndim and a.has(0) and a.has(-1) and m.chance(0.4) else COMPLEX
    return m.choose(table, a=a)


ALGEBRA = ((2.0, matrices), (2.0, vectors), (0.6, transforms), (2.0, complexes))
