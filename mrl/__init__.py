"""mrl: reinforcement learning of language models at scale."""

__version__ = "0.1.0"
