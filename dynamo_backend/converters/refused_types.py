"""The element types for which eager's kernels for CPUs raise, op by op.

Where eager raises, so do we, with eager's own error: such a call is left to the library, whatever kernels of ours could
make of it. Ops that a decomposition makes of another are not asked: eager does not call them. The table is made by
``python -m tests.opinfo.refused_types``, from torch 2.13; a version that takes more types answers, by its own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.traceback import get_current_meta

# Types, and the ops of ATen that take none of them.
_TABLE = """
bfloat16 float16 float8_e4m3fn float8_e5m2:
    special_airy_ai.default special_bessel_j0.default special_bessel_j1.default special_bessel_y0.default
    special_bessel_y1.default special_chebyshev_polynomial_t.default special_chebyshev_polynomial_u.default
    special_chebyshev_polynomial_v.default special_chebyshev_polynomial_w.default special_erfcx.default
    special_hermite_polynomial_h.default special_hermite_polynomial_he.default special_laguerre_polynomial_l.default
    special_legendre_polynomial_p.default special_log_ndtr.default special_modified_bessel_i0.default
    special_modified_bessel_i1.default special_modified_bessel_k0.default special_modified_bessel_k1.default
    special_ndtri.default special_scaled_modified_bessel_k0.default special_scaled_modified_bessel_k1.default
    special_shifted_chebyshev_polynomial_t.default special_shifted_chebyshev_polynomial_u.default
    special_shifted_chebyshev_polynomial_v.default special_shifted_chebyshev_polynomial_w.default
    special_spherical_bessel_j0.default special_zeta.default
bfloat16 float16 float8_e4m3fn float8_e5m2 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    avg_pool3d.default
bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint16 uint32 uint64 bool:
    _upsample_bilinear2d_aa.default
bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    _cdist_forward.default _histogramdd_bin_edges.default _histogramdd_from_bin_cts.default _pdist_forward.default
    histogram.bin_ct multi_margin_loss.default multilabel_margin_loss_forward.default polar.default
bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    complex.default
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2:
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint16 uint32 uint64:
    bitwise_not.default
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bool:
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd.default lcm.default
float8_e4m3fn:
    isinf.default
float8_e4m3fn float8_e5m2:
    acos.default acosh.default add.Scalar angle.default asin.default asinh.default atan.default atan2.default
    atanh.default copysign.Tensor cos.default cosh.default cumprod.default cumsum.default deg2rad.default
    digamma.default div.Scalar div.Tensor erf.default erfc.default erfinv.default exp.default exp2.default expm1.default
    i0.default isneginf.default isposinf.default ldexp.Tensor lgamma.default log.default log10.default log1p.default
    log2.default logit.default logsumexp.default mul.Scalar mul.Tensor nan_to_num.default nansum.default
    polygamma.default prod.default prod.dim_int rad2deg.default reciprocal.default rsqrt.default sigmoid.default
    signbit.default sin.default sinc.default sinh.default sort.default sort.stable special_entr.default
    special_i0e.default special_i1.default special_i1e.default special_xlog1py.default sqrt.default sum.default
    sum.dim_IntList tan.default tanh.default unique_consecutive.default xlogy.Tensor
float8_e4m3fn float8_e5m2 bool:
    ceil.default floor.default mvlgamma.default randint_like.default randint_like.low_dtype round.default sub.Scalar
    trunc.default
float8_e4m3fn float8_e5m2 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    avg_pool2d.default convolution.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint16 uint32 uint64 bool:
    upsample_bilinear2d.default upsample_nearest2d.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64:
    im2col.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default _embedding_bag_forward_only.default
    _histogramdd_from_bin_tensors.default _log_softmax.default _prelu_kernel.default _safe_softmax.default
    _softmax.default _softmax_backward_data.default adaptive_max_pool2d.default adaptive_max_pool3d.default
    addcdiv.default bernoulli.default binary_cross_entropy.default binary_cross_entropy_with_logits.default celu.default
    dist.default elu.default frac.default fractional_max_pool2d.default fractional_max_pool3d.default frexp.Tensor
    gelu.default glu.default grid_sampler_2d.default grid_sampler_3d.default hardshrink.default hardsigmoid.default
    hardswish.default histc.default histogram.bins_tensor huber_loss.default hypot.default igamma.default
    igammac.default leaky_relu.default lerp.Scalar lerp.Tensor linalg_vector_norm.default log_sigmoid_forward.default
    logaddexp.default logaddexp2.default logcumsumexp.default max_pool2d_with_indices_backward.default
    max_unpool2d.default max_unpool3d.default mean.default mean.dim mish.default mse_loss.default multinomial.default
    native_group_norm.default native_layer_norm.default nextafter.default nll_loss2d_forward.default
    nll_loss_forward.default norm.ScalarOpt_dim normal.Tensor_Tensor normal.Tensor_float randn_like.default
    renorm.default round.decimals segment_reduce.default silu.default smooth_l1_loss.default soft_margin_loss.default
    softplus.default softshrink.default std.correction std_mean.correction upsample_linear1d.default var.correction
    var_mean.correction
float8_e4m3fn float8_e5m2 uint16 uint32 uint64:
    _unsafe_masked_index_put_accumulate.default add.Tensor addr.default amax.default amin.default aminmax.default
    channel_shuffle.default clamp.default clamp_max.Tensor clamp_min.Tensor clamp_min.default count_nonzero.default
    count_nonzero.dim_IntList cummax.default cummin.default flip.default fmax.default fmin.default gather.default
    ge.Scalar ge.Tensor gt.Tensor hash_tensor.default heaviside.default index_add.default index_copy.default
    index_fill.int_Tensor le.Scalar le.Tensor logical_and.default logical_not.default logical_or.default
    logical_xor.default lt.Scalar lt.Tensor lu_unpack.default masked_fill.Scalar masked_fill.Tensor
    masked_scatter.default max.default max.dim maximum.default min.default min.dim minimum.default
    native_dropout_backward.default pixel_shuffle.default pixel_unshuffle.default pow.Tensor_Scalar put.default
    scatter.reduce scatter.src scatter_add.default scatter_reduce.two sgn.default sign.default take.default tril.default
    triu.default
float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bool:
    _trilinear.default addcmul.default addmv.default argmax.default argmin.default baddbmm.default bmm.default
    bucketize.Tensor clamp.Tensor div.Tensor_mode dot.default floor_divide.default fmod.Tensor hardtanh.default
    index_reduce.default isin.Tensor_Tensor linalg_cross.default max_pool2d_with_indices.default
    max_pool3d_with_indices.default median.default median.dim mv.default nanmedian.default nanmedian.dim neg.default
    pow.Tensor_Tensor reflection_pad1d.default relu.default remainder.Tensor replication_pad1d.default
    replication_pad2d.default rsub.Scalar rsub.Tensor sub.Tensor trace.default vdot.default
float8_e4m3fn float8_e5m2 uint8 uint16 uint32 uint64:
    _unsafe_masked_index.default index_fill.int_Scalar
float8_e4m3fn float8_e5m2 uint8 uint16 uint32 uint64 bool:
    threshold.default
uint16 uint32 uint64:
    index_put.default index_select.default
uint16 uint32 uint64 bool:
    abs.default addbmm.default addmm.default mm.default
"""


@cache
def refused_types() -> dict[str, frozenset[torch.dtype]]:
    """The types by the name of the op."""
    found: dict[str, frozenset[torch.dtype]] = {}
    for line in _TABLE.splitlines():
        if line.endswith(":"):
            types = frozenset(getattr(torch, name) for name in line[:-1].split())
        else:
            found.update((f"aten.{op}", types) for op in line.split())
    return found


def refused_type(op: OpOverload, args: Iterable[Any]) -> torch.dtype | None:
    """The type of the first tensor (fake or real) among the arguments of a call that eager refuses for it."""
    types = refused_types().get(str(op))
    if types is None:
        return None
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    return first.dtype if first is not None and first.dtype in types and first.device.type == "cpu" else None


def refused_call(node: fx.Node) -> torch.dtype | None:
    """The same of a node that stands for a call of eager's, not for a part of one."""
    # By name: torch copies what a node is made of.
    if not isinstance(node.target, OpOverload) or str(node.meta.get("original_aten")) != str(node.target):
        return None
    return refused_type(node.target, (a.meta.get("val") for a in node.args if isinstance(a, fx.Node)))


def whole_where_refused(table: dict[OpOverload, Callable[..., Any]]) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions that leave calls of eager's whole that it refuses."""

    def asking(op: OpOverload, fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def decompose(*args: Any, **kwargs: Any) -> Any:
            if refused_type(op, args) is not None and str(get_current_meta().get("original_aten")) == str(op):
                return NotImplemented
            return fn(*args, **kwargs)

        return decompose

    return {op: asking(op, fn) if str(op) in refused_types() else fn for op, fn in table.items()}
