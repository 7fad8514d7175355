"""cuBLAS: one matrix product, and one for each expert."""

import torch

from tests.megatron.te.extension.enums import refuse_quantized, torch_dtype


def _product(a, transa, b, transb, dtype, what):
    """cuBLAS sees column-major matrices: in rows the product is op(B) @ op(A)."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"{what}: cuBLAS multiplies equal dtypes only, not {a.dtype} and {b.dtype}")
    if dtype not in (a.dtype, torch.float32):
        raise RuntimeError(f"{what}: cuBLAS gives no {dtype} from {a.dtype}")
    rows = b.shape[:-1]
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if dtype != a.dtype:
        a, b = a.float(), b.float()
    product = (b.t() if transb else b) @ (a.t() if transa else a)
    return product.to(dtype) if transb else product.to(dtype).view(*rows, product.shape[-1])


def _given(tensor):
    return tensor is not None and tensor.numel() > 0


def _sum_of_rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1]).float().sum(0)


def generic_gemm(
    A, transa, B, transb, D, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
    alpha=1.0, beta=None,
):  # fmt: skip
    refuse_quantized(quantizer)
    if gelu or comm_overlap is not None or alpha != 1.0:
        raise NotImplementedError("generic_gemm with gelu, userbuffers or alpha has no stand-in on a CPU")
    dtype = D.dtype if D is not None else torch_dtype(out_dtype) or A.dtype
    out = _product(A, transa, B, transb, dtype, "generic_gemm")
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _sum_of_rows(B).to(bias.dtype)
    elif _given(bias):
        out = (out.float() + bias.float()).to(dtype)
    if D is not None:
        if D.numel() != out.numel():
            raise RuntimeError(f"generic_gemm: output of shape {tuple(D.shape)} for {tuple(out.shape)}")
        out = out.view_as(D)
        out = D.add_(out) if accumulate else D.copy_(out)
    return out, bias_grad, gelu_in, extra_output


def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspaces,
    workspace_size, accumulate, use_split_accumulator, math_sm_count,
):  # fmt: skip
    outs = list(torch.split(D[0], list(m_splits))) if single_output else D
    for a, b, out, own_bias in zip(A, B, outs, bias, strict=True):
        product = _product(a, transa, b, transb, out.dtype, "te_general_grouped_gemm").view_as(out)
        if _given(own_bias) and grad:
            own_bias.copy_(_sum_of_rows(b))
        elif _given(own_bias):
            product = (product.float() + own_bias.float()).to(out.dtype)
        out.add_(product) if accumulate else out.copy_(product)
    return bias
