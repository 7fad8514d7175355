"""Rows of the cache, checked by a model of what each row holds."""

import random

import pytest

from mrl.engines.native.scheduler import Scheduler, prefill_chunks
from mrl.types import Prompt


def simulate(prompt_lens, samples, num_rows, seed, share_prefill=True):
    """Runs random lengths; `held` says which prompt's tokens each row's first slots have, and how many slots follow."""
    rng = random.Random(seed)
    prompts = [Prompt(uid=i, prompt_ids=tuple(range(n)), text="") for i, n in enumerate(prompt_lens)]
    scheduler = Scheduler(prompts, samples, num_rows, room=9, share_prefill=share_prefill)
    held, step, done, prefills = {}, 0, [], 0

    def begin(rows):
        for row in rows:
            group = scheduler.running[row].group
            assert held[row][0] == group.index
            held[row] = (group.index, 0)

    def move(moves):
        for item in moves:
            index, extra = held[item.source]
            assert item.length >= prompt_lens[index]
            held[item.target] = (index, min(extra, item.length - prompt_lens[index]))

    while not scheduler.done:
        groups = scheduler.admit()
        prefills += len(groups)
        for offset, group in enumerate(groups):
            held[len(scheduler.running) + offset] = (group.index, 0)
        rows, moves = scheduler.start(groups, step)
        move(moves)
        begin(rows)
        assert 0 < len(scheduler.running) <= num_rows
        longest = max(prompt_lens[held[row][0]] + held[row][1] for row in range(len(scheduler.running))) + 1
        assert scheduler.longest(step) == longest
        step += 1
        for row, sample in enumerate(scheduler.running):
            assert held[row] == (sample.group.index, step - 1 - sample.started)
            held[row] = (held[row][0], held[row][1] + 1)
        ended = [row for row in range(len(scheduler.running)) if rng.random() < 0.3]
        done += [(scheduler.running[row].group.index, scheduler.running[row].sample_index) for row in ended]
        begun, moves = scheduler.retire(ended, step)
        move(moves)
        begin(begun)
    return done, prefills


@pytest.mark.parametrize("num_rows", [1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_runs_once_in_a_row_that_holds_its_prompt(num_rows, seed):
    done, prefills = simulate([3, 1, 7, 4, 2], samples=4, num_rows=num_rows, seed=seed)
    assert sorted(done) == [(prompt, sample) for prompt in range(5) for sample in range(4)]
    assert prefills == 5


def test_without_sharing_each_sample_is_prefilled():
    done, prefills = simulate([3, 1], samples=3, num_rows=4, seed=0, share_prefill=False)
    assert sorted(done) == [(prompt, sample) for prompt in range(2) for sample in range(3)]
    assert prefills == 6


@pytest.mark.parametrize("max_tokens", [1, 4, 7, 9, 11, 100])
def test_chunks_cover_every_prompt_in_order_within_the_budget_whatever_is_beside_it(max_tokens):
    lens = [5, 1, 9, 5, 2]
    seen = dict.fromkeys(range(10, 15), 0)
    for batch in prefill_chunks(lens, 10, max_tokens):
        assert batch
        assert all(chunk.start % max_tokens == 0 for chunk in batch)
        assert all(chunk.stop in (chunk.start + max_tokens, lens[chunk.row - 10]) for chunk in batch)
        assert sum(chunk.stop - chunk.start for chunk in batch) <= max_tokens
        assert batch == sorted(batch, key=lambda chunk: chunk.extent)
        for chunk in batch:
            assert chunk.start == seen[chunk.row]
            seen[chunk.row] = chunk.stop
    assert list(seen.values()) == lens
