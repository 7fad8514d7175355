"""The softmax of scores, for TransformerEngine's unfused attention in half precision."""

import torch

MASKED = -10000.0
"""What the kernel puts in the place of a masked score."""


def scaled_softmax_forward(input, scale):
    return torch.softmax(input.float() * float(scale), -1).to(input.dtype)


def scaled_masked_softmax_forward(input, mask, scale):
    scores = input.float() * float(scale)
    return torch.softmax(scores.masked_fill(mask.bool(), MASKED), -1).to(input.dtype)


def scaled_softmax_backward(grad, softmax, scale):
    g, p = grad.float(), softmax.float()
    return ((g - (g * p).sum(-1, keepdim=True)) * p * float(scale)).to(grad.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
