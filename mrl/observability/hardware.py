"""Accelerator and cluster specifications, from which `mrl plan` predicts and MFU is computed.

Sizes and rates are the vendors' peak figures, not measurements. The achievable fractions of them and the memory
overheads are assumptions. Users describe their own cluster in a YAML file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from mrl.config.did_you_mean import did_you_mean
from mrl.config.yaml_file import read_yaml
from mrl.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """Specification of one kind of node.

    Attributes:
        gpus_per_node: GPUs that share the fast links.
        memory_bytes: Memory of one GPU.
        bf16_flops: Dense bf16 rate of one GPU, FLOP/s.
        memory_bytes_per_s: Memory bandwidth of one GPU.
        intra_node_bytes_per_s: Bandwidth into one GPU from the others of its node.
        inter_node_bytes_per_s: Bandwidth into one GPU from other nodes.
        device_names: `torch.cuda.get_device_name()` of these GPUs.
        context_bytes: Assumed memory per GPU for the CUDA context and library workspaces.
        communicator_bytes: Assumed memory per GPU and process group of more than one rank.
        engine_context_bytes: Assumed memory per GPU that TensorRT-LLM uses even while its engine sleeps: kernels,
            workspaces, its own communicators. Users report 1 to 3 GiB; it was not measured here.
        memory_frac: Assumed fraction of a GPU's memory that the allocator can fill before it fragments, (0, 1].
        train_flops_frac: Assumed fraction of `bf16_flops` reached by forward and backward passes, (0, 1].
        prefill_flops_frac: Assumed fraction of `bf16_flops` reached by prefill, (0, 1].
        decode_frac: Assumed fraction of `memory_bytes_per_s` and `bf16_flops` reached by decoding, (0, 1].
    """

    gpus_per_node: int
    memory_bytes: int
    bf16_flops: float
    memory_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    device_names: tuple[str, ...] = ()
    context_bytes: int = 10**9
    communicator_bytes: int = 2 * 10**8
    engine_context_bytes: int = 2 * 10**9
    memory_frac: float = 0.95
    train_flops_frac: float = 0.4
    prefill_flops_frac: float = 0.5
    decode_frac: float = 0.5


MAX_FIGURE = 1e24
"""Upper bound of any plausible rate or size, to catch typing errors."""

HARDWARE = {
    "a100": Hardware(8, 80 * 10**9, 312e12, 2.039e12, 300e9, 25e9, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")),
    "a100_pcie": Hardware(
        8, 80 * 10**9, 312e12, 1.935e12, 32e9, 25e9, ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe")
    ),
    "h100": Hardware(8, 80 * 10**9, 989.4e12, 3.35e12, 450e9, 50e9, ("NVIDIA H100 80GB HBM3",)),
    "h100_pcie": Hardware(8, 80 * 10**9, 756e12, 2.0e12, 64e9, 50e9, ("NVIDIA H100 PCIe",)),
    "h200": Hardware(8, 141 * 10**9, 989.4e12, 4.8e12, 450e9, 50e9, ("NVIDIA H200",)),
    "b200": Hardware(8, 180 * 10**9, 2250e12, 8.0e12, 900e9, 50e9, ("NVIDIA B200",)),
}
"""Specifications by name. Link rates are one direction (half of the vendor's NVLink or PCIe figure), with one
InfiniBand port per GPU (200 Gb/s for A100, 400 Gb/s for the others).
"""


def peak_bf16_flops(device_name: str) -> float | None:
    """Returns the dense bf16 rate of a device by `torch.cuda.get_device_name()`, FLOP/s; None for unknown devices."""
    return next((found.bf16_flops for found in HARDWARE.values() if device_name in found.device_names), None)


def load_hardware(name: str) -> Hardware:
    """Returns a named specification, or reads a YAML file with `base` (a name) and the fields that differ.

    Raises:
        UserError: The name or file does not exist, or the file has an unknown key or an invalid value.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--hardware {name} is not in the table.{did_you_mean(name, HARDWARE)} Known: {', '.join(HARDWARE)}; or "
            "give a YAML file."
        )
    given = read_yaml(path, "--hardware")
    figures = {field.name for field in fields(Hardware)} - {"device_names"}
    if not isinstance(given, dict) or str(given.get("base", "h100")) not in HARDWARE:
        raise UserError(f"--hardware {name}: expected a mapping with base: one of {', '.join(HARDWARE)}, and figures.")
    base = HARDWARE[str(given.pop("base", "h100"))]
    figures_given = {str(key): value for key, value in given.items()}
    for key, value in figures_given.items():
        if key not in figures:
            raise UserError(f"--hardware {name}: unknown figure '{key}'. Known: {', '.join(sorted(figures))}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_FIGURE:
            raise UserError(f"--hardware {name}: {key} is {value!r}; expected a number above 0.")
        if key.endswith("_frac") and value > 1:
            raise UserError(f"--hardware {name}: {key} is {value!r}; expected a fraction in (0, 1].")
    return replace(base, **figures_given)
