"""Episodes of eight turns with each environment, in a real job whose policy says what a script has.

Nothing but the draw of a token is scripted: the engine reads, caches and scores as always, the environments answer in
their workers, samples travel to the actor as in a step. `python -m tests.rollout.episodes.scripted FOLDER` is a rank of
an MPI job, which reads the file `task` there and leaves what it found.
"""

import json
import pickle
import sys
from pathlib import Path

import torch

from mrl.algorithms.functional.sampling import stream_key
from mrl.config.config import load
from mrl.distributed import launch
from mrl.distributed.collectives import world_group
from mrl.engines import _multiturn_sample
from mrl.engines.native import cpu_ops, torch_ops
from mrl.rollout.dispatch import dispatch_samples
from mrl.rollout.episodes import episodes
from mrl.train import sample_rollouts
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from tests.environments.test_adapters import listed

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "environments"
TURNS = 8
MASK = (1 << 64) - 1


def worlds(folder):
    """Each environment there is, with its arguments; and one of TRL's kind, one of Gymnasium's."""
    library = folder / "library"
    library.mkdir(exist_ok=True)
    for name in ("cats", "dogs"):
        (library / f"{name}.txt").write_text(f"All about {name}: four legs.\n")
    agent = [sys.executable, str(TESTS / "agent.py"), "count"]
    return {
        "guess": ("guess", {"low": 100, "high": 999, "max_guesses": TURNS}),
        "calculator": ("calculator", {}),
        "search": ("search", {"folder": str(library)}),
        "python": ("python", {"strict": False}),
        "functions": ("functions", {"tools": [f"{TESTS / 'functions.py'}:later"]}),
        "program": ("program", {"command": agent}),
        "verl_tools": ("verl_tools", {"tools": listed()}),
        "trl": ("tests.environments.foreign:Counter", {}),
        "gymnasium": ("tests.environments.foreign:Walk", {"length": 5 * TURNS}),
    }


CALLS = {
    "calculator": ("calculator", {"expression": "{turn} * 7"}),
    "search": ("search", {"query": "cats {turn}"}),
    "python": ("python", {"code": "print({turn} + 1)"}),
    "functions": ("later", {"text": "<{turn}>"}),
    "verl_tools": ("check", {"answer": "{turn}"}),
    "trl": ("add", {"by": 2}),
}
"""By environment: a tool of its, and arguments in which the turn stands."""


def written(form, name, arguments):
    """A call as the format has it."""
    if form == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    if form == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments})
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def script(world, form):
    """What the policy says, turn by turn."""
    if world not in CALLS:
        return [f"{turn + 1}" if world == "guess" else f"so {turn}?" for turn in range(TURNS)]
    name, arguments = CALLS[world]
    filled = [
        {key: value.format(turn=turn) if isinstance(value, str) else value for key, value in arguments.items()}
        for turn in range(TURNS - 1)
    ]
    return [*(written(form, name, each) for each in filled), "that is all"]


def rows():
    """A data row for each environment."""
    create = {name: {"create_kwargs": {"ground_truth": "4"}} for name in ("check", "again")}
    return [
        {
            "prompt": [{"role": "user", "content": f"let us talk of {world}"}],
            "answer": "", "world": world, "name": world, "goal": 9, "turns": TURNS - 1,
            "extra_info": {"tools_kwargs": create},
        }
        for world in worlds(HERE) if world
    ]  # fmt: skip


class _Script:
    """What is drawn in place of a token: by the sample's random numbers, which name it and its turn."""

    def __init__(self, tokenizer, form):
        self.tokenizer, self.form, self.said = tokenizer, form, {}

    def note(self, key, prompt, turn):
        texts = script(prompt.row["world"], self.form)
        ids = [*self.tokenizer.encode(texts[turn]), self.tokenizer.eos_ids[0]] if turn < len(texts) else []
        self.said[key & MASK] = ids

    def draw(self, probs_NV, keys_and_counts):
        keys, counts = keys_and_counts
        said = [self.said[key & MASK][count] for key, count in zip(keys.tolist(), counts.tolist(), strict=True)]
        return torch.tensor(said)


def talked(words, form):
    """On a rank: what the engine saw turn by turn, what would be trained, and how the two score it."""
    config = load(words[1], words[2:])
    with open_trainer(build_run_plan(config), log=False) as trainer:
        trainer.resume()
        trainer.init_reference_and_critic(0)
        trainer.sync_weights_if_stale()
        told = _Script(trainer.tokenizer, form)
        seen, uids = {}, []
        asked, run, ask, answers = (
            _multiturn_sample.MultiTurnSample.as_prompt,
            episodes.Episodes.run, episodes._EnvironmentClient.submit, episodes._EnvironmentClient.wait_for_replies,
        )  # fmt: skip

        def later(one, seed):
            found = asked(one, seed)
            turn = sum(own and not before for own, before in zip(one.mask, [False, *one.mask], strict=False))
            told.note(stream_key(seed, found.uid, 0), one.prompt, turn)
            return found

        def begun(one, engine, prompts, sampling):
            uids.extend(prompt.uid for prompt in prompts)
            for prompt in prompts:
                for index in range(sampling.n):
                    told.note(stream_key(sampling.seed, prompt.uid, index), prompt, 0)
            return run(one, engine, prompts, sampling)

        def stopped(talk, said):
            seen.setdefault(said.key, []).append((True, list(said.ids)))
            ask(talk, said)

        def answered(talk, keys):
            found = answers(talk, keys)
            for key, ids in zip(keys, found, strict=True):
                seen[key] += [(False, list(ids))] if ids is not None else []
            return found

        patched = [
            (_multiturn_sample.MultiTurnSample, "as_prompt", later), (episodes.Episodes, "run", begun),
            (episodes._EnvironmentClient, "submit", stopped),
            (episodes._EnvironmentClient, "wait_for_replies", answered),
            (cpu_ops.Compiled, "sample", torch_ops.Operations.sample),
            (torch_ops, "uniforms", lambda keys, counts: (keys, counts)),
            (torch_ops, "draw", told.draw),
        ]  # fmt: skip
        before = [(place, name, getattr(place, name)) for place, name, _ in patched]
        for place, name, function in patched:
            setattr(place, name, function)
        try:
            sample_rollouts(trainer, 1, world_group())
        finally:
            for place, name, function in before:
                setattr(place, name, function)
        table, rollouts, _ = trainer.take_batch(1)
        batch = dispatch_samples(rollouts, table, trainer.groups, config.train.batch_size, keep_groups=True).batch
        scored, _ = trainer.actor.score(batch)
        ids = [part.tolist() for part in torch.split(batch.tokens_P, batch.seq_lens_B.tolist())]
        lens = batch.response_lens_B.tolist()
        trained = {}
        for row, key in enumerate(zip(batch.group_id_B.tolist(), batch.sample_index_B.tolist(), strict=True)):
            parts = (batch.response_mask_R, batch.rollout_logprobs_R, scored)
            mask, sampled, actor = (torch.split(part, lens)[row].tolist() for part in parts)
            length = len(ids[row]) - lens[row]
            trained[key] = (ids[row][:length], ids[row][length:], mask, sampled, actor)
        return {
            (rollout.prompt.row["world"], rollout.sample_index): {
                "seen": seen[uids.index(rollout.prompt.uid), rollout.sample_index],
                "prompt": rollout.prompt.prompt_ids,
                "trained": trained.get((rollout.prompt.uid, rollout.sample_index)),
                "episode": rollout.episode,
            }
            for rollout in rollouts
        }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    words_given, form_given = pickle.loads((place / "task").read_bytes())
    rank = launch.get_launcher_env().rank  # before MPI's ranks end with the job
    (place / str(rank)).write_bytes(pickle.dumps(talked(words_given, form_given)))
