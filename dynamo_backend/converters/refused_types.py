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
bfloat16 float16 float8_e4m3fn float8_e5m2 complex64 complex128:
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
bfloat16 float16 float8_e4m3fn float8_e5m2 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    avg_pool3d.default avg_pool3d_backward.default
bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint16 uint32 uint64 bool complex64 complex128:
    _upsample_bilinear2d_aa.default
bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    _cdist_backward.default _cdist_forward.default _histogramdd_bin_edges.default _histogramdd_from_bin_cts.default
    _pdist_backward.default _pdist_forward.default _upsample_bilinear2d_aa_backward.default histogram.bin_ct
    multi_margin_loss.default multilabel_margin_loss_forward.default polar.default
bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    complex.default
complex64 complex128:
    linspace.Tensor_Scalar linspace.Tensor_Tensor
float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    rrelu_with_noise_functional.default
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 complex64 complex128:
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bool complex64 complex128:
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd.default lcm.default
float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 uint16 uint32 uint64 complex64 complex128:
    bitwise_not.default
float8_e4m3fn:
    isinf.default
float8_e4m3fn float8_e5m2:
    acos.default acosh.default add.Scalar angle.default asin.default asinh.default atan.default atanh.default
    cauchy.default cos.default cosh.default cumprod.default cumsum.default div.Scalar div.Tensor exp.default
    exp2.default expm1.default exponential.default ldexp.Tensor log.default log10.default log1p.default log2.default
    logsumexp.default mul.Scalar mul.Tensor nan_to_num.default prod.default prod.dim_int reciprocal.default
    rsqrt.default sigmoid.default sin.default sinc.default sinh.default sqrt.default sum.default sum.dim_IntList
    tan.default tanh.default
float8_e4m3fn float8_e5m2 bool:
    sub.Scalar
float8_e4m3fn float8_e5m2 bool complex64 complex128:
    ceil.default floor.default mvlgamma.default randint_like.default randint_like.low_dtype round.default trunc.default
float8_e4m3fn float8_e5m2 complex64 complex128:
    atan2.default copysign.Tensor deg2rad.default digamma.default erf.default erfc.default erfinv.default
    glu_backward.default i0.default isneginf.default isposinf.default lgamma.default logit.default nansum.default
    polygamma.default rad2deg.default signbit.default sort.default sort.stable special_entr.default special_i0e.default
    special_i1.default special_i1e.default special_xlog1py.default unique_consecutive.default xlogy.Tensor
float8_e4m3fn float8_e5m2 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    avg_pool2d.default avg_pool2d_backward.default convolution.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint16 uint32 uint64 bool complex64 complex128:
    upsample_bilinear2d.default upsample_nearest2d.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64:
    col2im.default im2col.default
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool:
    addcdiv.default dist.default lerp.Scalar lerp.Tensor linalg_vector_norm.default logaddexp.default
    logcumsumexp.default mean.default mean.dim norm.ScalarOpt_dim normal.Tensor_float normal_functional.default
    randn_like.default reflection_pad1d_backward.default renorm.default replication_pad1d_backward.default
    replication_pad2d_backward.default sigmoid_backward.default silu.default silu_backward.default
    soft_margin_loss.default std.correction std_mean.correction tanh_backward.default uniform.default var.correction
    var_mean.correction
float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128:
    _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d.default
    _adaptive_avg_pool3d_backward.default _batch_norm_with_update_functional.default _embedding_bag_forward_only.default
    _embedding_bag_per_sample_weights_backward.default _histogramdd_from_bin_tensors.default _log_softmax.default
    _log_softmax_backward_data.default _native_batch_norm_legit_functional.default
    _native_batch_norm_legit_no_training.default _prelu_kernel.default _prelu_kernel_backward.default
    _safe_softmax.default _softmax.default _softmax_backward_data.default adaptive_max_pool2d.default
    adaptive_max_pool2d_backward.default adaptive_max_pool3d.default adaptive_max_pool3d_backward.default
    batch_norm_backward.default bernoulli.default binary_cross_entropy.default binary_cross_entropy_backward.default
    binary_cross_entropy_with_logits.default celu.default convolution_backward.default elu.default elu_backward.default
    frac.default fractional_max_pool2d.default fractional_max_pool3d.default frexp.Tensor gelu.default
    gelu_backward.default glu.default grid_sampler_2d.default grid_sampler_2d_backward.default grid_sampler_3d.default
    grid_sampler_3d_backward.default hardshrink.default hardsigmoid.default hardsigmoid_backward.default
    hardswish.default hardswish_backward.default hardtanh_backward.default histc.default histogram.bins_tensor
    huber_loss.default huber_loss_backward.default hypot.default igamma.default igammac.default leaky_relu.default
    leaky_relu_backward.default log_normal.default log_sigmoid_backward.default log_sigmoid_forward.default
    logaddexp2.default logit_backward.default max_pool2d_with_indices_backward.default
    max_pool3d_with_indices_backward.default max_unpool2d.default max_unpool3d.default mish.default
    mish_backward.default mse_loss.default multinomial.default native_batch_norm_backward.default
    native_group_norm.default native_group_norm_backward.default native_layer_norm.default
    native_layer_norm_backward.default nextafter.default nll_loss2d_backward.default nll_loss2d_forward.default
    nll_loss_backward.default nll_loss_forward.default normal.Tensor_Tensor round.decimals segment_reduce.default
    smooth_l1_loss.default softplus.default softplus_backward.default softshrink.default upsample_linear1d.default
float8_e4m3fn float8_e5m2 uint16 uint32 uint64:
    _unsafe_masked_index_put_accumulate.default add.Tensor addr.default channel_shuffle.default count_nonzero.default
    count_nonzero.dim_IntList embedding_dense_backward.default flip.default gather.default index_add.default
    index_copy.default index_fill.int_Tensor logical_and.default logical_not.default logical_or.default
    logical_xor.default lu_unpack.default masked_fill.Scalar masked_fill.Tensor masked_scatter.default
    native_dropout_backward.default pixel_shuffle.default pixel_unshuffle.default pow.Scalar pow.Tensor_Scalar
    put.default scatter.reduce scatter.src scatter.value scatter_add.default scatter_reduce.two sgn.default
    soft_margin_loss_backward.default take.default tril.default triu.default unfold_backward.default
float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bool:
    _trilinear.default addcmul.default addmv.default baddbmm.default bmm.default dot.default linalg_cross.default
    mv.default neg.default pow.Tensor_Tensor reflection_pad1d.default replication_pad1d.default
    replication_pad2d.default rsub.Scalar rsub.Tensor sub.Tensor trace.default vdot.default
float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bool complex64 complex128:
    argmax.default argmin.default bucketize.Tensor clamp.Tensor div.Tensor_mode floor_divide.default fmod.Tensor
    geometric.default hardtanh.default index_reduce.default isin.Tensor_Tensor max_pool2d_with_indices.default
    max_pool3d_with_indices.default median.default median.dim mse_loss_backward.default nanmedian.default nanmedian.dim
    relu.default remainder.Tensor smooth_l1_loss_backward.default threshold_backward.default
float8_e4m3fn float8_e5m2 uint16 uint32 uint64 complex64 complex128:
    amax.default amin.default aminmax.default bernoulli.p clamp.default clamp_max.Tensor clamp_min.Tensor
    clamp_min.default cummax.default cummin.default fmax.default fmin.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor
    hash_tensor.default heaviside.default le.Scalar le.Tensor lt.Scalar lt.Tensor max.default max.dim maximum.default
    min.default min.dim minimum.default sign.default
float8_e4m3fn float8_e5m2 uint8 uint16 uint32 uint64:
    _unsafe_masked_index.default index_fill.int_Scalar
float8_e4m3fn float8_e5m2 uint8 uint16 uint32 uint64 bool complex64 complex128:
    threshold.default
uint16 uint32 uint64:
    _unsafe_index_put.default index_put.default index_select.default masked_scatter_backward.default
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
