"""The kernels that go over many tensors at once: Adam, norms, scaling."""

import torch


@torch.no_grad()
def multi_tensor_scale(chunk_size, noop, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * float(scale))
        if not torch.isfinite(source).all():
            noop.fill_(1)


def multi_tensor_scale_tensor(chunk_size, noop, lists, scale):
    """From 2.14 on: the scale is a tensor."""
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise TypeError(f"multi_tensor_scale_tensor: the scale must be one float32, not {scale!r}")
    multi_tensor_scale(chunk_size, noop, lists, scale)


@torch.no_grad()
def multi_tensor_l2norm(chunk_size, noop, lists, per_tensor=False):
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().view(1), norms if per_tensor else torch.zeros(0)


def multi_tensor_unscale_l2norm(chunk_size, noop, lists, inv_scale, per_tensor=False):
    return multi_tensor_l2norm(chunk_size, noop, [[t.float() * float(inv_scale) for t in lists[0]]], per_tensor)


@torch.no_grad()
def multi_tensor_adam(chunk_size, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
    """mode 1: AdamW, 0: L2. A fifth list holds fp32 master weights of the second's."""
    if not isinstance(step, int):  # a C int: the binding refuses a float
        raise TypeError(f"multi_tensor_adam: step must be an int, not {step!r}")
    lr = float(lr)
    correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    masters = lists[4] if len(lists) > 4 else [None] * len(lists[0])
    for gradient, param, exp_avg, exp_avg_sq, master in zip(*lists[:4], masters, strict=True):
        grad, weight = gradient.float(), (param if master is None else master).float()
        if mode == 0:
            grad = grad + weight_decay * weight
        exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
        exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
        update = (exp_avg / correct1) / ((exp_avg_sq / correct2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * weight
        weight = weight - lr * update
        param.copy_(weight)
        if master is not None:
            master.copy_(weight)


@torch.no_grad()
def multi_tensor_adam_param_remainder(chunk_size, noop, lists, *options):
    """The fifth list holds the lower halves, int16, of fp32 master weights; the second their upper halves, rounded up
    where the lower half is below zero as an int16. adam.cu takes each half for two bytes, in the order of the machine.
    """
    gradients, params, exp_avgs, exp_avg_sqs, lows = lists
    masters = [torch.empty(param.shape) for param in params]
    for param, low, master in zip(params, lows, masters, strict=True):
        if (param.dtype, low.dtype) != (torch.bfloat16, torch.int16):
            raise TypeError(f"multi_tensor_adam_param_remainder: {param.dtype} and {low.dtype}")
        halves = master.view(torch.int16).view(*master.shape, 2)
        halves[..., 1] = torch.where(low < 0, param.view(torch.int16) - 1, param.view(torch.int16))
        halves[..., 0] = low
    multi_tensor_adam(chunk_size, noop, [gradients, masters, exp_avgs, exp_avg_sqs], *options)
    for param, low, master in zip(params, lows, masters, strict=True):
        halves = master.view(torch.int16).view(*master.shape, 2)
        low.copy_(halves[..., 0])
        param.view(torch.int16).copy_(torch.where(low < 0, halves[..., 1] + 1, halves[..., 1]))


def multi_tensor_adam_capturable(
    chunk_size, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale
):
    if noop.item() == 1:
        return
    gradients = [gradient.float() * float(inv_scale) for gradient in lists[0]]
    options = (lr, beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, noop, [gradients, *lists[1:]], *options)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable
