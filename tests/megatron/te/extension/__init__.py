"""TransformerEngine's C++ extension, `transformer_engine_torch`, in plain PyTorch for bf16, fp16 and fp32.

A function that has no stand-in raises NotImplementedError when it is called, not when it is imported. Where cuBLAS
refuses a combination of dtypes, so do the products: a test on a CPU is to fail where a GPU would.
"""

# ruff: noqa: F401, F403  -- TransformerEngine takes all of it: `from transformer_engine_torch import *`
from tests.megatron.te.cuda import missing as _missing
from tests.megatron.te.extension.adam import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_param_remainder,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from tests.megatron.te.extension.attention import fused_attn_bwd, fused_attn_fwd, get_fused_attn_backend
from tests.megatron.te.extension.enums import *
from tests.megatron.te.extension.norms import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from tests.megatron.te.extension.packed import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)
from tests.megatron.te.extension.products import generic_gemm, te_general_grouped_gemm
from tests.megatron.te.extension.rope import fused_rope_backward, fused_rope_forward
from tests.megatron.te.extension.softmax import (
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
)

__getattr__ = _missing("transformer_engine_torch")
