"""Ops that are library calls on purpose, and why."""

from __future__ import annotations

from .registry import library

library(
    "matrix product: BLAS, oneDNN or cuBLAS",
    "aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default", "aten.mv.default",
    "aten.dot.default", "aten.vdot.default", "aten._int_mm.default", "aten._scaled_mm.default", "aten.addmv.default",
    "aten.addbmm.default", "aten._addmm_activation.default",
)  # fmt: skip
library(
    "convolution: oneDNN or cuDNN",
    "aten.convolution.default", "aten.convolution_backward.default", "aten.mkldnn_convolution.default",
    "aten._convolution.default",
)  # fmt: skip
library("matrix product: oneDNN, with the weight in its layout", "mkldnn._linear_pointwise.default")
library(
    "convolution: oneDNN, with the filters in its layout",
    "mkldnn._convolution_pointwise.default", "mkldnn._convolution_pointwise.binary",
    "mkldnn._convolution_transpose_pointwise.default",
)  # fmt: skip
library(
    "attention: torch's flash and memory-efficient kernels",
    *(
        f"aten.{name}{backward}.default"
        for name in (
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable", "_flash_attention", "_efficient_attention",
        )
        for backward in ("", "_backward")
    ),
    "aten._flash_attention_forward.default", "aten._efficient_attention_forward.default",
)  # fmt: skip
library(
    "matrix product: a library's, summed in float32",
    "aten.mm.dtype", "aten.addmm.dtype",
)  # fmt: skip
library("a copy in memory of its own, that chunks of a loss can share a kernel", "aten.narrow_copy.default")
library(
    "sort",
    "aten.sort.default", "aten.sort.stable", "aten.topk.default", "aten.kthvalue.default", "aten.median.dim",
    "aten.median.default", "aten.nanmedian.dim", "aten.nanmedian.default", "aten.mode.default", "aten._unique2.default",
    "aten.unique_dim.default", "aten.bincount.default",
)  # fmt: skip
library(
    "Fourier transform",
    "aten._fft_r2c.default", "aten._fft_c2r.default", "aten._fft_c2c.default",
)  # fmt: skip
library(
    "linear algebra: LAPACK or cuSOLVER",
    "aten.linalg_inv_ex.default", "aten._linalg_svd.default", "aten.linalg_qr.default", "aten._linalg_eigh.default",
    "aten.linalg_cholesky_ex.default", "aten._linalg_solve_ex.default", "aten._linalg_det.default",
    "aten.linalg_lu_factor_ex.default", "aten.triangular_solve.default", "aten.linalg_solve_triangular.default",
    "aten.cholesky_solve.default", "aten._linalg_slogdet.default",
)  # fmt: skip
library(
    "a size or value decided by data",
    "aten.nonzero.default", "aten.masked_select.default", "aten.item.default", "aten._local_scalar_dense.default",
    "aten.repeat_interleave.Tensor",
)  # fmt: skip
library(
    "control flow between programs: its bodies are graphs of their own",
    "hop.cond", "hop.while_loop", "hop.while_loop_stack_output", "hop.scan", "hop.invoke_subgraph",
)  # fmt: skip
library("a kernel of the user's", "hop.triton_kernel_wrapper_functional")
library("an op of the user's that writes to its arguments", "hop.auto_functionalized_v2", "hop.auto_functionalized")
