"""The task and the algorithm of `told.py`, in the ranks."""

import os
import time

from mrl.algorithms.grpo import Grpo
from mrl.data.synthetic_tasks import Addition
from mrl.trainer.run_plan import PEEKED_PROMPTS
from tests.e2e.told import LONG_S, number, tells


class Sums(Addition):
    def train_row(self, index):
        tells("draw", number("draw") - PEEKED_PROMPTS, os.getpid())
        return super().train_row(index)

    def val_row(self, index):
        return super().val_row(index) | {"held_out": True}


class Policy(Grpo):
    def loss(self, logprobs_R, entropy_R, microbatch):
        count = number("loss")
        tells("loss", count, os.getpid())
        if tells("hang", count, os.getpid()):
            time.sleep(LONG_S)
        return super().loss(logprobs_R, entropy_R, microbatch)
