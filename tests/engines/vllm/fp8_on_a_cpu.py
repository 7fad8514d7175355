"""vLLM's FP8 for GPUs in its build for CPUs: its own layers and its own Python, and torch for two Triton kernels.

Replaced are the questions whether a GPU is there, and what a kernel computes: the product with a matrix of blocks, and
the experts. Parameters, loaders, post-processing, and the quantisation of activations are vLLM's.
"""

import torch.nn.functional as F


def meant(stored, scales, side=128):
    """The values that blocks stand for, fp32 [..., M, N]."""
    grown = scales.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return stored.float() * grown[..., : stored.size(-2), : stored.size(-1)]


def product(values, weight, value_scales, weight_scales, block_size, dtype):
    return (meant(values.unsqueeze(1), value_scales.unsqueeze(1)).squeeze(1) @ meant(weight, weight_scales).T).to(dtype)


def experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *_, **__):
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[rows].float() @ meant(w1[expert], self.w1_scale[expert]).T).chunk(2, -1)
        done = (F.silu(gate) * up) @ meant(w2[expert], self.w2_scale[expert]).T
        output.index_add_(0, rows, (done * topk_weights[rows, places, None]).to(output.dtype))


def install():
    """In this process."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(TritonFp8BlockScaledMMKernel)
    TritonFp8BlockScaledMMKernel.is_supported = classmethod(lambda *_: (True, None))
    fp8_utils.w8a8_triton_block_scaled_mm = product
    TritonExperts._supports_current_device = staticmethod(lambda: True)
    TritonExperts._supports_quant_scheme = staticmethod(lambda *_: True)
    TritonExperts.expects_unquantized_inputs = True
    TritonExperts.workspace_shapes = lambda self, tokens, *_: ((0,), (0,), (tokens, self.moe_config.hidden_dim))
    TritonExperts.apply = experts
