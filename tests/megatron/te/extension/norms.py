"""RMSNorm and LayerNorm, in fp32 inside; `zero_centered` weights are stored less one."""

import torch

from tests.megatron.te.extension.enums import refuse_quantized, torch_dtype


def _scale(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def _as_asked(y, out, dtype, x):
    y = y.to(torch_dtype(dtype) or x.dtype)
    return y if out is None else out.copy_(y.view_as(out))


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    refuse_quantized(quantizer)
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    y = x * rsigma.unsqueeze(-1) * _scale(weight, zero_centered_gamma)
    return [_as_asked(y, ln_out, otype, input), None, rsigma]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    normed, grad = x.float() * rsigma.unsqueeze(-1), dz.float()
    inner = grad * _scale(gamma, zero_centered_gamma)
    dx = rsigma.unsqueeze(-1) * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(gamma.dtype)]


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    refuse_quantized(quantizer)
    x = input.float()
    mu = x.mean(-1)
    centered = x - mu.unsqueeze(-1)
    rsigma = torch.rsqrt(centered.square().mean(-1) + eps)
    y = centered * rsigma.unsqueeze(-1) * _scale(weight, zero_centered_gamma)
    return [_as_asked(y if bias is None else y + bias.float(), ln_out, otype, input), mu, rsigma]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    normed, grad = (x.float() - mu.unsqueeze(-1)) * rsigma.unsqueeze(-1), dz.float()
    inner = grad * _scale(gamma, zero_centered_gamma)
    mean = inner.mean(-1, keepdim=True) + normed * (inner * normed).mean(-1, keepdim=True)
    dx = rsigma.unsqueeze(-1) * (inner - mean)
    dgamma, dbeta = (t.reshape(-1, x.shape[-1]).sum(0).to(gamma.dtype) for t in (grad * normed, grad))
    return [dx.to(x.dtype), dgamma, dbeta]
