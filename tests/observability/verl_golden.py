"""Writes verl_golden.json: held-out samples, and what verl's own code makes of them.

    python tests/observability/verl_golden.py VERL  # a clone of github.com/volcengine/verl, here at commit b178a3c

Of verl only numpy and torch are needed: `process_validation_metrics` is run from its file, `_val_metrics_update` is cut
out of the trainer's class.
"""

import ast
import json
import random
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

GOLDEN = Path(__file__).with_name("verl_golden.json")


def verls_own(folder):
    """`_val_metrics_update(self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns)`."""
    for name in ("verl", "verl.utils", "verl.utils.import_utils", "verl.utils.torch_functional"):
        sys.modules[name] = MagicMock()  # what the two functions do not use
    sys.modules["verl.utils.import_utils"].deprecated = lambda replacement: lambda function: function
    metric_utils = types.ModuleType("metric_utils")
    path = Path(folder) / "verl" / "trainer" / "ppo"
    exec((path / "metric_utils.py").read_text(), vars(metric_utils))
    tree = ast.parse((path / "ray_trainer.py").read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_val_metrics_update")
    exec(compile(ast.Module([function], []), "ray_trainer.py", "exec"), vars(metric_utils))
    return metric_utils._val_metrics_update


def case(num_samples, *, facts, seed):
    draw = random.Random(seed)
    samples = []
    for uid, source in enumerate(["openai/gsm8k", "math", "openai/gsm8k", "math", "math"]):
        for _ in range(num_samples):
            told = {"score": draw.choice([0.0, 0.5, 1.0])}
            if facts:
                told |= {
                    "acc": float(draw.random() < 0.5),
                    "pred": draw.choice(["7", "8", "9"]),
                    "tries": draw.random(),
                }
            samples.append({"uid": uid, "source": source, "reward": told["score"], "facts": told if facts else {}})
    return samples


def main():
    verl = verls_own(sys.argv[1])
    cases = []
    for seed, (num_samples, facts) in enumerate([(1, False), (1, True), (2, True), (4, False), (5, True)]):
        samples = case(num_samples, facts=facts, seed=seed)
        infos = {"reward": [sample["reward"] for sample in samples]}
        for key in samples[0]["facts"]:
            infos[key] = [sample["facts"][key] for sample in samples]
        found = verl(None, [s["source"] for s in samples], [str(s["uid"]) for s in samples], infos, [])
        cases.append({"samples": samples, "metrics": {name: float(value) for name, value in found.items()}})
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(one) for one in cases) + "\n]\n")


if __name__ == "__main__":
    main()
