"""VAPO: PPO whose critic learns Monte-Carlo returns and whose lambda grows with the response length; clip-higher.

Source: arXiv 2504.05118, sections 4.1 and 4.2. Its value pretraining is `train.critic_warmup`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.ppo import Ppo


class Vapo(Ppo):
    """GAE with lambda 1 for the critic and 1 - 1 / (alpha l) for the policy, with l = the response length."""

    defaults: ClassVar[dict[str, Any]] = {
        **Ppo.defaults,
        "value_lam": 1.0,
        "lam_length_alpha": 0.05,
        "clip_high": 0.28,
    }


ALGORITHM = Vapo
