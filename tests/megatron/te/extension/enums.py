"""Enums, empty classes and versions that TransformerEngine's Python names; a number only ever comes back to here."""

import enum

import torch


def _enum(name, *members):
    return enum.IntEnum(name, {member: value for value, member in enumerate(members)})


DType = _enum(  # these and no others: from 2.17 on TE's Python has an enum of its own, which it compares with this one
    "DType",
    *("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16"),
    *("kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
)
FP8FwdTensors = _enum(
    "FP8FwdTensors", *(f"GEMM{index}_{what}" for index in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT"))
)
FP8BwdTensors = _enum("FP8BwdTensors", *(f"GRAD_{what}{index}" for index in (1, 2, 3) for what in ("OUTPUT", "INPUT")))
CommOverlapType = _enum("CommOverlapType", "RS", "AG")
CommOverlapAlgo = _enum("CommOverlapAlgo", "BULK_OVERLAP_AG")
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY", "COMPACT")

NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    *("NVTE_SBHD", "NVTE_BSHD", "NVTE_THD"),
    *("NVTE_BSHD_2SBHD", "NVTE_SBHD_2BSHD", "NVTE_THD_2BSHD", "NVTE_THD_2SBHD"),
    *("NVTE_BHSD", "NVTE_QKV_Format_NOT_SET"),  # from 2.15
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    *(
        f"NVTE_{layout}"
        for layout in (
            *("SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD"),
            *("BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D", "BSHD_BSHD_BSHD"),
            *("T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD"),
            *("SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "THD_BSHD_BSHD", "THD_SBHD_SBHD"),
            *(f"Paged_KV_{q}_{kv}_{kv}" for q in ("BSHD", "SBHD", "THD") for kv in ("BSHD", "SBHD")),
            *("BHSD_BHSD_BHSD", "QKV_Layout_NOT_SET"),  # from 2.15 and 2.20
        )
    ),
)
NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    *("NVTE_NO_MASK", "NVTE_PADDING_MASK", "NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK"),
    *("NVTE_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"),
)
NVTE_Softmax_Type = _enum(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"
)
NVTEScalingMode = _enum("NVTEScalingMode", "NVTE_DELAYED_TENSOR_SCALING", "NVTE_MXFP8_1D_SCALING")  # from 2.20
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP", "BITMAP_U8")  # from 2.17
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL", "FUSED_ATOMIC")  # from 2.20
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)
NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0  # named before 2.16; no member, as 2.19 compares the members

_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def torch_dtype(dtype):
    """Of the extension's DType, or of torch's own, or None."""
    return dtype if dtype is None or isinstance(dtype, torch.dtype) else _TORCH[dtype]


def refuse_quantized(quantizer):
    if quantizer is not None:
        raise NotImplementedError("quantized tensors have no stand-in on a CPU")


class FP8TensorMeta:
    pass


class CommOverlapHelper:
    pass


class CommOverlap:
    pass


class CommOverlapP2P:
    pass


def get_cudnn_version():
    return 91002


def get_cublasLt_version():
    return 120803


def get_num_cublas_streams():
    return 1


def get_stream_priority_range(*args):
    return 0, 0


def device_supports_multicast(*args):
    return False


def ubuf_built_with_mpi():
    return False
