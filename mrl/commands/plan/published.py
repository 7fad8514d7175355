"""Efficiencies that other systems reached, as their authors published them; nothing here was measured with mrl.

A `Published` is a fraction of a peak rate, and a time at it is the time at the peak divided by it. A `PublishedSync` is
the rate of a weight sync. `derived` says how a figure follows from the published ones, if it is not printed there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.observability.hardware import Hardware


@dataclass(frozen=True)
class Publication:
    """Publication of a measurement.

    Attributes:
        title: Title and place in it.
        year: Year of publication.
        url: Address.
    """

    title: str
    year: int
    url: str

    def __str__(self) -> str:
        return f"{self.title} ({self.year}), {self.url}"


@dataclass(frozen=True)
class Published:
    """Published efficiency of a phase.

    Attributes:
        efficiency: Fraction of the peak rate, (0, 1].
        measured: System, model and GPUs of the measurement.
        source: Publication.
        derived: How the fraction follows from the published figures; "" if it is printed there.
    """

    efficiency: float
    measured: str
    source: Publication
    derived: str = ""


@dataclass(frozen=True)
class PublishedSync:
    """Published rate of a weight sync.

    Attributes:
        bytes_per_s: Rate, bytes/s: of the entire model if `gathers`, else into each receiving GPU.
        gathers: The system sends the entire model to each node or GPU, which keeps its part.
        measured: System, model and GPUs of the measurement.
        source: Publication.
    """

    bytes_per_s: float
    gathers: bool
    measured: str
    source: Publication


_LLAMA_7B_WEIGHTS = 6.607e9
"""Parameters of LLaMA 7B without its embedding (32,000 x 4,096), which is only looked up."""
_LLAMA_7B_KV = 2 * 32 * 4096
"""Elements of a token in the KV cache of LLaMA 7B: keys and values of 32 layers."""

TRAINING = Published(
    efficiency=0.41,
    measured="Megatron-Core, smallest model of the weak scaling (2B, dense), H100; 0.47 to 0.48 for the largest (462B)",
    source=Publication(
        "Megatron-LM README, 'Training Speed and Scalability'", 2024, "https://github.com/NVIDIA/Megatron-LM"
    ),
)
TRAINING_MOE = Published(
    efficiency=0.39,
    measured="Megatron-Core, Qwen2-57B-A14B, H100",
    source=Publication(
        "MoE Parallel Folding: Heterogeneous Parallelism Mappings for Efficient Large-Scale MoE Model Training with "
        "Megatron Core, abstract",
        2025,
        "https://arxiv.org/abs/2504.14960",
    ),
)
_TRTLLM = Publication(
    "Performance of TensorRT-LLM, docs/source/performance.md of v0.6.1", 2023, "https://github.com/NVIDIA/TensorRT-LLM"
)
PREFILL = Published(
    efficiency=(2 * _LLAMA_7B_WEIGHTS * 2048 + 2 * 32 * 4096 * 2048**2) / 0.133 / 312e12,
    measured="TensorRT-LLM 0.5, LLaMA 7B in FP16, a prompt of 2,048 tokens in 133 ms, one A100",
    source=_TRTLLM,
    derived="FLOPs of weights and causal attention over 133 ms and 312 TFLOP/s",
)
DECODE = Published(
    efficiency=6818 / 112 * (_LLAMA_7B_WEIGHTS + 112 * (128 + 2048 / 2) * _LLAMA_7B_KV) / 3.35e12,
    measured="TensorRT-LLM 0.6.1, LLaMA 7B in FP8 with an FP8 cache, 112 sequences of 128 + 2,048 tokens: 6,818 "
    "tokens/s, one H100",
    source=_TRTLLM,
    derived="bytes of weights and of the mean KV cache per pass, times 6,818 / 112 passes/s, over 3.35 TB/s",
)

SYNC_GATHERED = PublishedSync(
    bytes_per_s=30.5e9 * 2 / 7.0,
    gathers=True,
    measured="slime, Megatron to SGLang on the same GPUs, Qwen3-30B-A3B in 7 s (counted as bf16)",
    source=Publication(
        "Efficient RL Training - Optimizing Weight Sync in slime", 2025, "https://hebiao064.github.io/rl-weight-sync"
    ),
)
SYNC_LOAD = PublishedSync(
    bytes_per_s=235.1e9 * 2 / 6.22,
    gathers=True,
    measured="checkpoint-engine, host memory to vLLM on 8 H800 (TP 8), Qwen3-235B-A22B in bf16 in 6.22 s; without the "
    "trainer's side",
    source=Publication(
        "checkpoint-engine README, 'Benchmark'", 2025, "https://github.com/MoonshotAI/checkpoint-engine"
    ),
)
SYNC_DIRECT = PublishedSync(
    bytes_per_s=1e12 / 128 / 1.3,
    gathers=False,
    measured="Perplexity, Kimi-K2 (10^12 parameters in FP8) from 256 GPUs to 128 others in 1.3 s; a lower bound, "
    "because the number of replicas is not published",
    source=Publication(
        "Weight Transfer for RL Post-Training in under 2 seconds",
        2025,
        "https://research.perplexity.ai/articles/weight-transfer-for-rl-post-training-in-under-2-seconds",
    ),
)
SYNCS = (SYNC_GATHERED, SYNC_LOAD, SYNC_DIRECT)


def training(*, moe: bool) -> Published:
    """Returns the published efficiency of training a dense or MoE model."""
    return TRAINING_MOE if moe else TRAINING


def at_published(hardware: Hardware, *, moe: bool) -> Hardware:
    """Returns the hardware with the published fractions of its peak rates."""
    return replace(
        hardware,
        train_flops_frac=training(moe=moe).efficiency,
        prefill_flops_frac=PREFILL.efficiency,
        decode_frac=DECODE.efficiency,
    )


def at_peak(hardware: Hardware) -> Hardware:
    """Returns the hardware with its peak rates fully reached."""
    return replace(hardware, train_flops_frac=1.0, prefill_flops_frac=1.0, decode_frac=1.0)
