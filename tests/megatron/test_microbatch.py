"""The steps of packing a microbatch: layout of rows, scored tokens, and the part of a context-parallel rank."""

import pytest
import torch

from mrl.algorithms.functional.logprobs import Distribution
from mrl.data.shared_prefix import each_token, shared_prefixes
from mrl.megatron.microbatch import (
    input_mask,
    lay_out,
    lay_out_by_sequence,
    scored_tokens,
    shard_for_cp,
    shard_targets,
)
from mrl.megatron.model import Targets
from tests.megatron.actors import make_batch

UNIT, AT_LEAST = 8, 160


def layouts(batch):
    inputs_I, lens = batch.tokens_P[input_mask(batch)], (batch.seq_lens_B - 1).tolist()
    return inputs_I, [
        lay_out(lens, shared_prefixes(inputs_I, lens), unit=UNIT),
        lay_out(lens, each_token(inputs_I.numel()), unit=UNIT, at_least=AT_LEAST),
        lay_out_by_sequence(lens, unit=UNIT),
    ]


def test_each_input_has_a_row_at_its_position_and_rows_are_a_multiple_of_the_unit():
    batch = make_batch()
    inputs_I, found = layouts(batch)
    positions_I = torch.cat([torch.arange(length - 1) for length in batch.seq_lens_B.tolist()])
    for layout in found:
        tokens = torch.full((layout.count,), -1)
        tokens[layout.row_I] = inputs_I
        assert layout.count % UNIT == 0
        assert torch.equal(tokens[layout.row_I], inputs_I)
        assert torch.equal(layout.positions[layout.row_I], positions_I)
    assert found[0].count < found[1].count
    assert found[1].count == AT_LEAST


@pytest.mark.parametrize("layout", [lay_out([], each_token(0), unit=UNIT), lay_out_by_sequence([], unit=UNIT)])
def test_a_microbatch_without_sequences_is_one_unit_of_padding(layout):
    assert (layout.count, layout.lens, layout.row_I.numel()) == (UNIT, [UNIT], 0)


@pytest.mark.parametrize("lens", [[5, 8, 3], [16, 16], []])
def test_padding_of_all_sequences_is_a_sequence_of_its_own(lens):
    layout = lay_out_by_sequence(lens, unit=4, total_unit=16)
    padded = [-(-length // 4) * 4 for length in lens]
    assert layout.count == sum(layout.lens) > 0
    assert layout.count % 16 == 0
    assert layout.lens[: len(padded)] == padded
    assert all(length % 4 == 0 for length in layout.lens)


def test_a_response_token_is_predicted_by_the_row_of_the_token_before_it():
    batch = make_batch()
    inputs_I, found = layouts(batch)
    responses = [
        tokens[prompt_len - 1 :]
        for tokens, prompt_len in zip(
            batch.tokens_P.split(batch.seq_lens_B.tolist()), batch.prompt_lens_B.tolist(), strict=True
        )
    ]
    for layout in found:
        tokens = torch.full((layout.count,), -1)
        tokens[layout.row_I] = inputs_I
        rows_R, tokens_R = scored_tokens(batch, layout)
        assert torch.equal(tokens[rows_R], torch.cat([each[:-1] for each in responses]))
        assert torch.equal(tokens_R, torch.cat([each[1:] for each in responses]))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_rows_and_the_scored_tokens(size):
    batch = make_batch()
    _, found = layouts(batch)
    for layout in found:
        rows_R, tokens_R = scored_tokens(batch, layout)
        shards = [shard_for_cp(layout, rows_R, size, rank) for rank in range(size)]
        gathered = torch.cat([shard.rows for shard in shards])
        assert torch.equal(gathered.sort().values, torch.arange(layout.count))
        assert torch.stack([shard.is_own_R for shard in shards]).sum(0).eq(1).all()
        for shard in shards:
            assert torch.equal(gathered[shard.row_I], layout.row_I)
            own = shard_targets(Targets(rows_R, tokens_R, Distribution()), shard, None)
            assert torch.equal(shard.rows[own.rows_R], rows_R[shard.is_own_R])
            assert torch.equal(own.tokens_R, tokens_R[shard.is_own_R])
