"""What a verl command line became: a config of mrl, how it is started, and what did not go into it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Translation:
    """mrl's config, and what did not go into it.

    Attributes:
        text: YAML; differences from mrl's defaults only.
        num_nodes: Hosts.
        gpus_per_node: Ranks of a host.
        via: Who starts them, as `mrl launch --via` has it.
        missing: Settings without a place, each with the reason.
        moot: Settings that need none, each with the reason.
        differs: What went into it and is not the same here.
    """

    text: str = ""
    num_nodes: int = 1
    gpus_per_node: int = 1
    via: str = "torchrun"
    missing: list[str] = field(default_factory=list)
    moot: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def command(self, config: str) -> str:
        """Returns the command line that starts the run.

        Args:
            config: Path of the config.
        """
        if self.num_nodes * self.gpus_per_node == 1:
            return f"mrl train {config}"
        words = f"mrl launch --via {self.via} --nodes {self.num_nodes} --gpus-per-node {self.gpus_per_node}"
        if self.via == "torchrun" and self.num_nodes > 1:
            words += " --master-addr FIRST_HOST --node-rank K"
        return f"{words} {config}"
