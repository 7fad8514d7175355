"""Result of a translation from verl: a config, the command that starts it, and the settings left out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Translation:
    """Config of mrl, and the settings that are not in it.

    Attributes:
        text: Config as YAML, without values that are mrl's defaults.
        num_nodes: Number of hosts.
        gpus_per_node: Ranks per host.
        via: Launcher, an option of `mrl launch --via`.
        missing: Settings that mrl does not support, each with the reason.
        moot: Settings that mrl does not need, each with the reason.
        differs: Translated settings with another effect in mrl.
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
