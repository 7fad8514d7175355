"""Figures of accelerators and clusters: what predictions are made from.

Owns the table `HARDWARE` and the reading of a user's own figures. Sizes and rates are the vendors' peak figures, not
measurements; the parts of them that are reached, and what takes memory without being a tensor, are assumptions. A
cluster's own figures belong in a YAML file of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from mrl.config.did_you_mean import did_you_mean
from mrl.config.yaml_file import read_yaml
from mrl.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """One kind of node.

    Attributes:
        gpus_per_node: GPUs that share the fast links.
        memory_bytes: Of one GPU.
        bf16_flops: Dense bf16 rate of one GPU, FLOP/s.
        memory_bytes_per_s: Of one GPU's memory.
        intra_node_bytes_per_s: Into one GPU from the others of its node.
        inter_node_bytes_per_s: Into one GPU from other nodes.
        device_names: `torch.cuda.get_device_name()` of these GPUs.
        context_bytes: Assumed: of a GPU, for its context and the libraries' workspaces.
        communicator_bytes: Assumed: of a GPU, for each process group of several ranks that it is in.
        engine_context_bytes: Assumed: of a GPU, for what TensorRT-LLM keeps there whether its engine sleeps or not:
            kernels, workspaces, communicators of its own. Users speak of 1 to 3 GiB; it was not measured here.
        memory_frac: Assumed: part of a GPU's memory that the allocator can fill before it fragments, (0, 1].
        train_flops_frac: Assumed: part of `bf16_flops` that forward and backward passes reach, (0, 1].
        prefill_flops_frac: Assumed: part of `bf16_flops` that reading prompts reaches, (0, 1].
        decode_frac: Assumed: part of `memory_bytes_per_s` and `bf16_flops` that decoding reaches, (0, 1].
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
"""Above any rate or size of a machine."""

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
"""By name; links are one direction: half of what the vendor calls NVLink's or PCIe's bandwidth, and one InfiniBand port
for each GPU (200 Gb/s beside A100, 400 Gb/s beside the others)."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bf16 rate of a device, by `torch.cuda.get_device_name()`; None where the table has none."""
    return next((found.bf16_flops for found in HARDWARE.values() if device_name in found.device_names), None)


def load_hardware(name: str) -> Hardware:
    """A row of the table, or a YAML file with `base` (a row) and the figures that differ.

    Raises:
        UserError: No such row or file, or the file has a key or value that is none.
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
            raise UserError(f"--hardware {name}: {key} is {value!r}; expected a part, (0, 1].")
    return replace(base, **figures_given)
