"""mrl: reinforcement learning of language models at scale.

    import mrl
    mrl.train(mrl.load_config("configs/quickstart.yaml", ["train.num_steps=2"]))

The public Python interface: the names in `__all__` are stable even if files move. Each is imported on first use
(PEP 562), so that `import mrl` does not import torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.algorithms._policy_gradient import PolicyGradient
    from mrl.algorithms._policy_loss import PolicyLoss
    from mrl.algorithms.base import Algorithm, Outcomes
    from mrl.algorithms.functional.losses import Surrogate
    from mrl.config.config import Config
    from mrl.config.config import load as load_config
    from mrl.data.reward_order import RowRewards
    from mrl.data.synthetic_tasks import Task
    from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
    from mrl.environments.base import Action, Environment, Observation, ToolCall
    from mrl.environments.toolbox import ToolEnvironment
    from mrl.errors import ClusterError, UserError
    from mrl.observability.loggers.base import Logger, Opening
    from mrl.resharding.layout import Piece, StoredTensor
    from mrl.resharding.weight_slice import WeightSlice
    from mrl.rewards.base import RewardFunction
    from mrl.train import evaluate, train
    from mrl.trainer.callbacks import Callback, TrainResult
    from mrl.types import Prompt, Rollout, RolloutBatch

__version__ = "0.1.0"

__all__ = [
    "Action", "Algorithm", "Callback", "ClusterError", "Config", "EngineSpec", "Environment", "Logger",
    "Observation", "Opening", "Outcomes", "Piece", "PolicyGradient", "PolicyLoss", "Prompt", "RewardFunction",
    "Rollout", "RolloutBatch", "RolloutEngine", "RowRewards", "SamplingConfig", "StoredTensor", "Surrogate", "Task",
    "ToolCall", "ToolEnvironment", "TrainResult", "UserError", "WeightSlice", "evaluate", "load_config", "train",
]  # fmt: skip

_HOMES = {
    "mrl.algorithms._policy_gradient": ("PolicyGradient",),
    "mrl.algorithms._policy_loss": ("PolicyLoss",),
    "mrl.algorithms.base": ("Algorithm", "Outcomes"),
    "mrl.algorithms.functional.losses": ("Surrogate",),
    "mrl.config.config": ("Config", "load_config"),
    "mrl.data.reward_order": ("RowRewards",),
    "mrl.data.synthetic_tasks": ("Task",),
    "mrl.engines.base": ("EngineSpec", "RolloutEngine", "SamplingConfig"),
    "mrl.environments.base": ("Action", "Environment", "Observation", "ToolCall"),
    "mrl.environments.toolbox": ("ToolEnvironment",),
    "mrl.errors": ("ClusterError", "UserError"),
    "mrl.observability.loggers.base": ("Logger", "Opening"),
    "mrl.rewards.base": ("RewardFunction",),
    "mrl.train": ("evaluate", "train"),
    "mrl.trainer.callbacks": ("Callback", "TrainResult"),
    "mrl.types": ("Prompt", "Rollout", "RolloutBatch"),
    "mrl.resharding.layout": ("Piece", "StoredTensor"),
    "mrl.resharding.weight_slice": ("WeightSlice",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(importlib.import_module(module), "load" if name == "load_config" else name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'mrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Module type that keeps `mrl.train` the function; importing mrl/train.py would replace it with the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
