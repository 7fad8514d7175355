"""What verl's own advantage estimators give for some rewards: writes `verl_advantages.json`.

    python tests/algorithms/functional/verl_advantages.py VERL  # a clone of github.com/volcengine/verl, at b178a3c

Of verl only the module of the estimators is run, which needs numpy and torch for these. Rewards are fp64 [N], at the
last token of responses of different lengths.
"""

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

GOLDEN = Path(__file__).with_name("verl_advantages.json")
ESTIMATORS = ("opo", "grpo_passk", "grpo", "rloo")
CASES = {
    "right and wrong": ([1, 0, 0, 1, 1, 0, 0, 0], [7, 3, 5, 2, 4, 4, 9, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    "graded": ([0.5, -1.0, 0.25, 0.75, 2.0, 2.0, 1.0, -0.5], [5, 6, 1, 2, 8, 3, 3, 4], [0, 1, 0, 1, 0, 1, 0, 1]),
    "equal": ([0.1, 0.1, 0.1, 1.0, 1.0, 0.0], [3, 4, 5, 2, 2, 2], [4, 4, 4, 2, 2, 2]),
}
"""Rewards, lengths and groups of samples."""


def main() -> None:
    """Runs every estimator on every case."""
    stubs = "verl.utils", "verl.utils.torch_functional", "verl.utils.import_utils", "verl.trainer.config"
    for name in ("verl", "verl.trainer", *stubs, "verl.workers", "verl.workers.config", "omegaconf"):
        sys.modules[name] = MagicMock()  # what these estimators do not use
    sys.modules["verl.utils.import_utils"].deprecated = lambda replacement: lambda function: function
    verl: dict = {"__name__": "core_algos"}
    exec((Path(sys.argv[1]) / "verl/trainer/ppo/core_algos.py").read_text(), verl)
    found = []
    for name, (rewards, lens, groups) in CASES.items():
        mask = (torch.arange(max(lens)) < torch.tensor(lens)[:, None]).double()
        tokens = torch.zeros_like(mask)
        tokens[torch.arange(len(lens)), torch.tensor(lens) - 1] = torch.tensor(rewards, dtype=torch.float64)
        for estimator in ESTIMATORS:
            for by_std in (True, False) if estimator.startswith("grpo") else (False,):
                keys = {"norm_adv_by_std_in_grpo": by_std} if estimator == "grpo" else {}
                advantages, _ = verl["get_adv_estimator_fn"](estimator)(
                    tokens.clone(), mask, np.array(groups), config={"norm_adv_by_std_in_grpo": by_std}, **keys
                )
                case = {"case": name, "estimator": estimator, "by_std": by_std, "rewards": rewards, "lens": lens}
                found.append({**case, "groups": groups, "advantages": advantages[:, 0].tolist()})
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")


if __name__ == "__main__":
    main()
