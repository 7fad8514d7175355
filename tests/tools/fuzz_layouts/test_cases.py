"""A seed is a case, for good; many seeds are many kinds of case."""

from fuzz_layouts.cases import draw

SEEDS = range(300)
RARE = {"train.num_epochs", "algorithm.overlong.penalty", "data.response_key", "data.chat_template"}


def test_a_seed_gives_the_same_case_again():
    assert all(draw(seed) == draw(seed) for seed in range(20))


def test_many_seeds_draw_every_kind_of_layout_and_setting():
    values = {}
    for case in map(draw, SEEDS):
        for settings in (case.settings, *(start.settings for start in case.starts)):
            for key, value in settings.items():
                values.setdefault(key, set()).add(str(value))
    assert values.keys() >= RARE
    assert values["parallel.tensor_model_parallel_size"] == {"1", "2", "4"}
    assert values["parallel.context_parallel_size"] == {"1", "2", "4"}
    assert values["parallel.expert_model_parallel_size"] == {"1", "2", "4"}
    assert values["algorithm.name"] > {"grpo", "dapo", "rloo", "reinforce_pp", "sft"}
    assert {start.ranks for case in map(draw, SEEDS) for start in case.starts} == {1, 2, 3, 4}
    assert sum(len(case.starts) > 1 for case in map(draw, SEEDS)) > len(SEEDS) // 6
