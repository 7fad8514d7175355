"""For every environment and tool format: what the engine saw is trained, turn by turn, and both score it alike."""

import json
import os
import pickle
import sys

import pytest

from mrl.distributed import launch
from mrl.distributed.local_ranks import free_port
from mrl.megatron import parallel_state
from tests.e2e import runs
from tests.engines.trtllm.conftest import STANDIN, forget
from tests.engines.trtllm.mpi_ranks import mpirun
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.ranks import run_ranks
from tests.rollout.episodes.scripted import CALLS, HERE, TURNS, rows, script, talked, worlds
from tests.rollout.episodes.templates import FORMATS, chat_tokenizer

pytestmark = pytest.mark.slow

PROBABILITY = 1e-4
"""The project's bound on what an engine and the actor say of a sampled token."""
TEMPLATES = {"hermes": "hermes", "llama3_json": "llama", "qwen3_coder": "qwen"}
"""By tool format."""


def on_a_rank(forms, ports, flavour=None):
    """What each format gave, with a port for each and one for the ranks afterwards; `flavour`: of the stand-in."""
    parallel_state.destroy()  # what an earlier test of these ranks left
    launch.shutdown_distributed()
    try:
        if flavour:
            sys.path.insert(0, str(STANDIN))
            os.environ[FLAVOUR_VARIABLE] = flavour
            forget()
        found = {}
        for place, (form, words) in enumerate(forms.items()):
            os.environ["MASTER_PORT"] = str(ports[place])
            found[form] = talked(words, form)
            parallel_state.destroy()
        return found
    finally:
        if flavour:
            sys.path.remove(str(STANDIN))
            del os.environ[FLAVOUR_VARIABLE]
            forget()
        os.environ["MASTER_PORT"] = str(ports[-1])
        launch.init_distributed("cpu", num_threads=1)


def arguments(folder, form, more=()):
    """The words of a run of one step with all environments."""
    tokens = folder / form
    tokenizer = chat_tokenizer(tokens, *FORMATS[TEMPLATES[form]])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    kwargs = json.dumps({"worlds": {name: list(given) for name, given in worlds(folder).items()}})
    words = [
        f"model.tokenizer={tokens}", "model.overrides={num_hidden_layers: 2, max_position_embeddings: 5000}",
        "~data.task", "~data.task_kwargs",
        f"data.train_files=[{folder}/rows.jsonl]", "data.prompt_key=prompt",
        f"train={{num_steps: 1, batch_size: {len(rows())}, minibatch_size: {len(rows())}, eval_interval: 0}}",
        "train.warm_start.num_steps=0", "actor.max_tokens_per_microbatch=5000",
        "rollout={n: 1, prompt_length: 2500, response_length: 2500, max_num_seqs: 4}", "algorithm.name=reinforce_pp",
        "rollout.gpu_memory_utilization=0.05", f"rollout.multi_turn={{enable: true, format: {form}}}",
        f"rollout.agent={{environment: '{HERE}/worlds.py:Many', num_workers: 2, environment_kwargs: {kwargs}}}",
        "reward.functions=[{name: environment}]", *more,
    ]  # fmt: skip
    return tokenizer, runs.arguments(folder / f"run_{form}", words)


ENGINES = {
    "native": [],
    "native at TP 2": ["rollout.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size=2"],
    "trtllm": ["rollout.name=trtllm"],
    "trtllm at TP 2": [
        "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size=2"
    ],
}  # fmt: skip


def over_mpi(folder, words, form):
    """What two ranks of MPI found."""
    (folder / "task").write_bytes(pickle.dumps((words, form)))
    done = mpirun(2, "-m", "tests.rollout.episodes.scripted", str(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]


def talks(folder, engine, forms):
    """By rank, and the tokenizers by format."""
    made = {form: arguments(folder, form, ENGINES[engine]) for form in forms}
    tokenizers, words = ({form: part[i] for form, part in made.items()} for i in (0, 1))
    ports = [free_port() for _ in range(len(forms) + 1)]
    if engine == "trtllm at TP 2":
        return [{form: one} for form in forms for one in over_mpi(folder, words[form], form)], tokenizers
    size = 2 if engine.endswith("2") else 1
    return run_ranks(size, on_a_rank, words, ports, "1.2" if engine == "trtllm" else None), tokenizers


@pytest.mark.parametrize(
    ("engine", "forms"),
    [
        ("native", list(TEMPLATES)),
        ("native at TP 2", ["qwen3_coder"]),
        ("trtllm", ["llama3_json"]),
        pytest.param("trtllm at TP 2", ["hermes"], marks=pytest.mark.mpi),  # MPI starts once in a process
    ],
)
def test_what_the_engine_saw_is_what_is_trained(engine, forms, tmp_path):
    ranks, tokenizers = talks(tmp_path, engine, forms)
    for form, tokenizer in tokenizers.items():
        found = ranks[0][form]
        assert {world for world, _ in found} == set(worlds(tmp_path))
        for (world, _), one in found.items():
            assert one["trained"] is not None, one["episode"].error
            prompt, response, mask, sampled, actor = one["trained"]
            seen = one["seen"]
            assert prompt == list(one["prompt"])
            assert response == [token for _, ids in seen for token in ids]
            assert mask == [own for own, ids in seen for _ in ids]
            assert [tokenizer.decode(ids[:-1]) for own, ids in seen if own] == script(world, form)
            episode = one["episode"]
            assert (episode.num_turns, episode.error, episode.num_failed_calls) == (TURNS, None, 0), (world, form)
            assert episode.num_tool_calls == (TURNS - 1 if world in CALLS else 0)
            apart = [abs(a - b) for a, b, own in zip(sampled, actor, mask, strict=True) if own]
            assert max(apart) <= PROBABILITY, (world, form)
            heard = [text for by, text in episode.turns if by == "environment"]
            assert len(heard) == TURNS - 1 and not any("Error" in text for text in heard), heard
        for other in ranks[1:]:
            assert {key: one["trained"] for key, one in other[form].items()} == {
                key: one["trained"] for key, one in found.items()
            }
