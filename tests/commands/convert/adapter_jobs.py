"""What the ranks of test_convert_adapters.py do; they import no peft."""

from torch import Tensor

from mrl.megatron import checkpoint
from tests.megatron.actors import CONSTANT, fill_adapters, full_adapters, full_weights, make_policy
from tests.trainer.lora_ranks import merged_weights


def adapters_saved(folder, arch, grid, lora, dtype="float32") -> tuple[dict[str, Tensor], ...]:
    """Saves an actor with adapters and an optimizer; returns its own weights, the adapters, and the merged weights."""
    policy = make_policy(arch, grid, actor={"lora": lora}, dtype=dtype)
    fill_adapters(policy)
    policy.start_optimizer(CONSTANT)
    checkpoint.save(folder, policy)
    return full_weights(policy), full_adapters(policy), merged_weights(policy)
