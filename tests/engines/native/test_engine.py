"""The native engine against transformers, and against itself under every way of running the same request."""

import pytest
import torch

from mrl.algorithms.functional.sampling import keep_threshold
from mrl.config.config import RolloutConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt
from tests.engines.native.tiny import FAMILIES, VOCAB, make_checkpoint, make_engine, make_prompts, reference, refit
from tests.engines.specs import spec_of
from tests.ranks import run_ranks

LOGPROB_ATOL = 1e-4
"""The project's bound on |difference of log-probabilities| between engine and judge in fp32."""
BF16_ATOL = 0.15
"""bf16 has 8 bits: logits of size 5 are off by 0.02 a rounding, and there is one in each of 3 layers' 8 operations."""

LENGTHS = (3, 9, 20, 9, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def qwen(folders):
    return folders("qwen2")


def score(model, rollout, temperature=1.0, **cut):
    """log-probabilities of a response by transformers under the sampling contract."""
    prompt = rollout.prompt.prompt_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *rollout.response_ids]])).logits[0, len(prompt) - 1 : -1]
    logits = logits.float() / temperature
    threshold = keep_threshold(logits, **{"top_k": -1, "top_p": 1.0, "min_p": 0.0, **cut})
    if threshold is not None:
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)


def tokens(rollouts):
    return {(r.prompt.uid, r.sample_index): r.response_ids for r in rollouts}


def assert_greedy_tokens_are_those_of_transformers(folder, **settings):
    """Tokens, and their log-probabilities."""
    model, prompts = reference(folder), make_prompts(LENGTHS)
    rollouts = make_engine(folder, **settings).generate(prompts, SamplingConfig(n=1, max_tokens=64, greedy=True))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.prompt_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert rollout.response_ids == expected[0, ids.size(1) :].tolist()
        torch.testing.assert_close(
            torch.tensor(rollout.rollout_logprobs), score(model, rollout), atol=LOGPROB_ATOL, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(folders, family):
    assert_greedy_tokens_are_those_of_transformers(folders(family))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_pytorchs_operators_give_the_same_tokens(folders, family):
    assert_greedy_tokens_are_those_of_transformers(folders(family), enforce_eager=True)


@pytest.mark.parametrize(
    ("temperature", "cut"),
    [
        (1.0, {}),
        (0.6, {}),
        (1.0, {"top_k": 7}),
        (1.3, {"top_p": 0.8}),
        (0.8, {"top_k": 30, "top_p": 0.9, "min_p": 0.05}),
    ],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(folders, temperature, cut):
    folder = folders("qwen3")
    model = reference(folder)
    sampling = SamplingConfig(n=3, max_tokens=24, temperature=temperature, seed=3, **cut)
    for rollout in make_engine(folder).generate(make_prompts(LENGTHS), sampling):
        expected = score(model, rollout, temperature, **cut)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, atol=LOGPROB_ATOL, rtol=0)


def test_samples_follow_the_model(qwen):
    """First tokens of 2000 samples of one prompt: the counts fit the softmax."""
    engine, count = make_engine(qwen), 2000
    prompt = make_prompts([6])
    rollouts = engine.generate(prompt, SamplingConfig(n=count, max_tokens=1))
    with torch.no_grad():
        probs = reference(qwen)(torch.tensor([prompt[0].prompt_ids])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in rollouts]), minlength=VOCAB)
    common = probs * count > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([probs[common], probs[~common].sum()[None]]).double() * count
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    # mean k - 1, standard deviation sqrt(2 (k - 1)): four of them above is one fixed seed in thousands
    freedom = observed.numel() - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_seqs": 7, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_batch(qwen, settings):
    sampling = SamplingConfig(n=4, max_tokens=20, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
    prompts = make_prompts(LENGTHS)
    wide = make_engine(qwen)
    expected = tokens(wide.generate(prompts, sampling))
    assert len({len(ids) for ids in expected.values()}) > 3  # rows end at different steps
    narrow = make_engine(qwen, **settings)
    assert tokens(narrow.generate(prompts, sampling)) == expected
    assert tokens(wide.generate(prompts[::-1], sampling)) == expected
    assert narrow.stats()["max_running"] <= settings.get("max_num_seqs", 16)


@pytest.mark.compiler
def test_the_bits_of_a_response_do_not_depend_on_what_is_read_beside_its_prompt(qwen):
    """Where a prompt is cut follows from its own length."""
    sampling = SamplingConfig(n=2, max_tokens=6, temperature=0.9, ignore_eos=True)
    prompts, engine = make_prompts(LENGTHS), make_engine(qwen, max_num_batched_tokens=8)
    together = engine.generate(prompts, sampling)
    alone = [rollout for prompt in prompts for rollout in engine.generate([prompt], sampling)]
    assert [one.rollout_logprobs for one in together] == [one.rollout_logprobs for one in alone]


def test_a_prompt_is_prefilled_once_for_its_samples(qwen):
    sampling, prompts = SamplingConfig(n=4, max_tokens=3, ignore_eos=True), make_prompts(LENGTHS)
    shared, single = make_engine(qwen, max_num_seqs=6), make_engine(qwen, enable_prefix_caching=False)
    shared.generate(prompts, sampling)
    single.generate(prompts, sampling)
    assert shared.stats()["prefill_tokens"] == sum(LENGTHS)
    assert single.stats()["prefill_tokens"] == 4 * sum(LENGTHS)


def test_another_seed_uid_or_sample_gives_other_tokens(qwen):
    engine, prompt = make_engine(qwen), make_prompts([8])[0]
    twin = Prompt(uid=99, prompt_ids=prompt.prompt_ids, text="")

    def sample(seed):
        return tokens(engine.generate([prompt, twin], SamplingConfig(n=2, max_tokens=16, temperature=3.0, seed=seed)))

    first, second = sample(0), sample(1)
    assert first == sample(0)
    assert len({tuple(ids) for ids in (*first.values(), *second.values())}) == 8


def _generate_on_ranks(folder, lengths, sampling, settings):
    group = torch.distributed.group.WORLD
    engine = make_engine(folder, tp_group=group, **settings)
    rollouts = engine.generate(make_prompts(lengths), sampling)
    return [(r.response_ids, r.rollout_logprobs, r.finish_reason) for r in rollouts]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(folders, family):
    folder = folders(family)
    sampling = SamplingConfig(n=2, max_tokens=24, temperature=0.9, top_p=0.95, stop_token_ids=(5, 6, 7))
    ranks = run_ranks(2, _generate_on_ranks, folder, LENGTHS, sampling, {"max_num_seqs": 4})
    assert ranks[0] == ranks[1]
    alone = make_engine(folder).generate(make_prompts(LENGTHS), sampling)
    assert [item[0] for item in ranks[0]] == [r.response_ids for r in alone]
    for (_, logprobs, reason), rollout in zip(ranks[0], alone, strict=True):
        assert reason == rollout.finish_reason
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(rollout.rollout_logprobs), atol=LOGPROB_ATOL, rtol=0
        )


def test_more_ranks_than_key_value_heads_share_a_head(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2", num_key_value_heads=1)
    sampling = SamplingConfig(n=1, max_tokens=16, greedy=True)
    ranks = run_ranks(2, _generate_on_ranks, folder, LENGTHS, sampling, {})
    alone = make_engine(folder).generate(make_prompts(LENGTHS), sampling)
    assert [item[0] for item in ranks[0]] == [r.response_ids for r in alone]


def test_an_end_token_stays_in_the_response_and_ends_it(qwen):
    engine, prompts = make_engine(qwen), make_prompts(LENGTHS)
    free = engine.generate(prompts, SamplingConfig(n=1, max_tokens=12, temperature=2.0))
    ends = {r.response_ids[4] for r in free}
    stopped = engine.generate(prompts, SamplingConfig(n=1, max_tokens=12, temperature=2.0, stop_token_ids=tuple(ends)))
    for long, short in zip(free, stopped, strict=True):
        cut = next(i for i, token in enumerate(long.response_ids) if token in ends) + 1
        assert short.response_ids == long.response_ids[:cut]
        assert len(short.rollout_logprobs) == cut
        assert short.finish_reason == "stop" and long.finish_reason == "length"
    ignored = engine.generate(
        prompts,
        SamplingConfig(n=1, max_tokens=12, temperature=2.0, stop_token_ids=tuple(ends), stop=("1",), ignore_eos=True),
    )
    assert tokens(ignored) == tokens(free)
    assert {r.finish_reason for r in ignored} == {"length"}


def test_a_stop_string_ends_a_response_where_it_is_complete(qwen):
    engine = make_engine(qwen, decode=lambda ids: "".join(f"{i:02d}" for i in ids))
    prompts = make_prompts(LENGTHS)
    free = engine.generate(prompts, SamplingConfig(n=2, max_tokens=12, temperature=2.0))
    wanted = "".join(f"{i:02d}" for i in free[3].response_ids)[9:13]  # spans three tokens
    stopped = engine.generate(prompts, SamplingConfig(n=2, max_tokens=12, temperature=2.0, stop=(wanted, "no such")))
    assert stopped[3].finish_reason == "stop"
    for long, short in zip(free, stopped, strict=True):
        text = "".join(f"{i:02d}" for i in long.response_ids)
        found = text.find(wanted)
        num = 12 if found < 0 else -(-(found + len(wanted)) // 2)
        assert short.response_ids == long.response_ids[:num]


def test_a_tight_cache_makes_samples_wait(qwen):
    sampling, prompts = SamplingConfig(n=4, max_tokens=16, temperature=0.9, stop_token_ids=(5,)), make_prompts(LENGTHS)
    expected = tokens(make_engine(qwen).generate(prompts, sampling))
    engine = make_engine(qwen)
    row_bytes = engine._cache.row_bytes(48)  # 20 + 16 tokens, rounded up to 16
    engine._cache.budget_bytes = 3 * row_bytes - 1
    assert tokens(engine.generate(prompts, sampling)) == expected
    assert engine.stats()["max_running"] == 2
    assert engine.stats()["kv_cache_bytes"] == 2 * row_bytes
    engine._cache.budget_bytes = row_bytes - 1
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        engine.generate(prompts, sampling)


def test_prompts_that_do_not_fit_are_refused(qwen):
    greedy = SamplingConfig(n=1, max_tokens=8, greedy=True)
    with pytest.raises(UserError, match=r"125 tokens.*rollout\.max_model_len"):
        make_engine(qwen).generate(make_prompts([125]), greedy)
    with pytest.raises(UserError, match="enable_chunked_prefill"):
        make_engine(qwen, enable_chunked_prefill=False, max_num_batched_tokens=8).generate(make_prompts([9]), greedy)
    with pytest.raises(UserError, match="vocabulary of 99"):
        make_engine(qwen).generate([Prompt(uid=0, prompt_ids=(1, 99), text="")], greedy)
    with pytest.raises(UserError, match="no tokens"):
        make_engine(qwen).generate([Prompt(uid=0, prompt_ids=(), text="", source="train.jsonl:3")], greedy)


def test_it_refuses_to_generate_asleep_or_without_whole_weights(qwen):
    prompts, greedy = make_prompts([4]), SamplingConfig(n=1, max_tokens=4, greedy=True)
    bare = NativeEngine(spec_of(RolloutConfig(prompt_length=8, response_length=8), arch_from_folder(qwen)))
    assert bare.policy_version == -1
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        bare.generate(prompts, greedy)
    engine = make_engine(qwen)
    before = tokens(engine.generate(prompts, greedy))
    assert engine.stats()["kv_cache_bytes"] > 0
    engine.sleep()
    assert engine._cache.allocated_bytes == 0
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate(prompts, greedy)
    engine.wake()
    assert tokens(engine.generate(prompts, greedy)) == before
    engine.begin_update()
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        engine.generate(prompts, greedy)
    engine.finish_update(7)
    rollouts = engine.generate(prompts, greedy)
    assert tokens(rollouts) == before and rollouts[0].policy_version == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_weights_take_nothing_and_the_next_update_brings_them_back(qwen, dtype):
    """Tensors stay the same objects at the same addresses: whoever holds views of them sees the new values."""
    prompts, greedy = make_prompts([4]), SamplingConfig(n=1, max_tokens=4, greedy=True)
    engine = make_engine(qwen, dtype=dtype)
    before, kept = tokens(engine.generate(prompts, greedy)), {k: w.clone() for k, w in engine._weights.items()}
    checksum = engine.checksum()
    engine.release()
    assert engine._stored.held_bytes == engine._copies.held_bytes == engine._cache.allocated_bytes == 0
    assert engine.policy_version == -1
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        engine.generate(prompts, greedy)
    engine.begin_update()
    engine.update_weights([WeightSlice(name, full_region(value.shape), value) for name, value in kept.items()])
    assert engine.checksum() == checksum
    engine.finish_update(3)
    assert tokens(engine.generate(prompts, greedy)) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_changes_the_output_and_no_address(folders, tmp_path, dtype):
    engine, prompts = make_engine(folders("qwen2_untied"), dtype=dtype), make_prompts(LENGTHS)
    greedy = SamplingConfig(n=1, max_tokens=12, greedy=True)
    first = tokens(engine.generate(prompts, greedy))
    addresses = {name: tensor.data_ptr() for name, tensor in engine._weights.items()}
    checksum = engine.checksum()
    other = make_checkpoint(tmp_path, "qwen2_untied", initializer_range=0.2)
    refit(engine, other, arch_from_folder(other), version=1)
    assert {name: tensor.data_ptr() for name, tensor in engine._weights.items()} == addresses
    assert engine.checksum() != checksum
    second = tokens(engine.generate(prompts, greedy))
    assert second != first
    assert second == tokens(make_engine(other, dtype=dtype).generate(prompts, greedy))
    refit(engine, folders("qwen2_untied"), arch_from_folder(other), version=2)
    assert engine.checksum() == checksum
    assert tokens(engine.generate(prompts, greedy)) == first


def test_update_refuses_what_does_not_fit(qwen):
    engine = make_engine(qwen)
    weight = torch.zeros(48)
    with pytest.raises(RuntimeError, match="begin_update"):
        engine.update_weights([WeightSlice("final_norm", full_region((48,)), weight)])
    engine.begin_update()
    for bad in (
        WeightSlice("no_such", full_region((48,)), weight),
        WeightSlice("final_norm", ((0, 47),), weight),
        WeightSlice("final_norm", ((1, 49),), weight),
        WeightSlice("final_norm", full_region((48,)), weight.bfloat16()),
    ):
        with pytest.raises(RuntimeError, match=bad.name):
            engine.update_weights([bad])


def test_logits_that_are_no_numbers_name_the_prompt(qwen):
    engine = make_engine(qwen)
    engine.begin_update()
    engine.update_weights([WeightSlice("layers.0.input_norm", ((3, 4),), torch.tensor([torch.nan]))])
    engine.finish_update(1)
    prompt = Prompt(uid=4, prompt_ids=(1, 2, 3, 4, 5, 6), text="", source="train.jsonl:17")
    for greedy in (True, False):
        with pytest.raises(UserError, match=r"train\.jsonl:17"):
            engine.generate([prompt, prompt], SamplingConfig(n=1, max_tokens=4, greedy=greedy))
    refit(engine, qwen, arch_from_folder(qwen), version=2)
    shorter = Prompt(uid=5, prompt_ids=(1, 2), text="")  # the slots behind it held keys that were no numbers
    engine.generate([prompt, shorter], SamplingConfig(n=1, max_tokens=4))


def test_bfloat16_scores_close_to_float32(qwen):
    model, engine = reference(qwen), make_engine(qwen, dtype=torch.bfloat16)
    for rollout in engine.generate(make_prompts(LENGTHS), SamplingConfig(n=2, max_tokens=16)):
        torch.testing.assert_close(
            torch.tensor(rollout.rollout_logprobs), score(model, rollout), atol=BF16_ATOL, rtol=0
        )


def test_no_prompts_give_no_rollouts(qwen):
    assert make_engine(qwen).generate([], SamplingConfig(n=2, max_tokens=4)) == []


def test_each_sampled_token_and_each_finished_sample_is_reported_once(qwen):
    engine, heard = make_engine(qwen, max_num_seqs=4), []
    engine.on_sampled = lambda num_tokens, uids: heard.append((num_tokens, list(uids)))
    prompts = make_prompts(LENGTHS)
    rollouts = engine.generate(prompts, SamplingConfig(n=3, max_tokens=7, stop_token_ids=(1, 2, 3)))
    assert sum(number for number, _ in heard) == sum(len(rollout.response_ids) for rollout in rollouts)
    uids = sorted(uid for _, finished in heard for uid in finished)
    assert uids == sorted(rollout.prompt.uid for rollout in rollouts) and len(uids) == 3 * len(prompts)
