"""The mapping of a TensorRT-LLM checkpoint, and what its layouts cover; the values are tested with the files."""

import pytest
import torch

from mrl.errors import UserError
from mrl.resharding.plan import check_coverage
from mrl.resharding.trtllm import TrtllmMapping, linear_modules, trtllm_layout
from tests.checkpoint.formats.trtllm_cases import ARCHS, CASES


def test_each_element_of_each_tensor_is_covered_once():
    for name, mapping in CASES:
        if not mapping.use_parallel_embedding:
            for rank in range(mapping.world_size):
                for tensor, stored in trtllm_layout(ARCHS[name], mapping, rank, "bfloat16").items():
                    check_coverage(tensor, stored)


def test_the_first_stages_hold_one_layer_more():
    for num_layers in (3, 5, 7):
        for pp in (1, 2, 3):
            arch = ARCHS["llama"].__class__(**{**vars(ARCHS["llama"]), "num_layers": num_layers})
            ours = [list(TrtllmMapping(1, pp).layers(arch, stage)) for stage in range(pp)]
            assert ours == [part.tolist() for part in torch.tensor_split(torch.arange(num_layers), pp)]


@pytest.mark.parametrize(
    ("given", "found"),
    [((4, 0, 0), (4, 1)), ((4, 2, 0), (2, 2)), ((4, 0, 4), (1, 4)), ((4, 2, 2), (2, 2)), ((1, 0, 0), (1, 1))],
)
def test_a_size_of_the_experts_that_is_left_out_is_what_the_other_leaves(given, found):
    mapping = TrtllmMapping(given[0], 1, given[1], given[2])
    assert (mapping.moe_tp_size, mapping.moe_ep_size) == found


def test_experts_go_to_neighbours_first():
    arch, mapping = ARCHS["qwen3_moe"], TrtllmMapping(4, 1, 2, 2)
    names = [
        {piece.hf_name.split(".")[5] for piece in layout["transformer.layers.0.mlp.proj.weight"].pieces}
        for rank in range(4)
        for layout in [trtllm_layout(arch, mapping, rank, "bfloat16")]
    ]
    assert names == [{"0", "1"}, {"2", "3"}, {"0", "1"}, {"2", "3"}]


def test_experts_have_three_dimensions_in_the_file():
    stored = trtllm_layout(ARCHS["qwen3_moe"], TrtllmMapping(4, 1, 2, 2), 0, "bfloat16")
    assert stored["transformer.layers.0.mlp.fc.weight"].view == (2, 8, 16)
    assert stored["transformer.layers.0.mlp.proj.weight"].view == (2, 16, 4)
    assert stored["transformer.layers.0.mlp.fc.weight"].shape == (16, 16)


def test_linear_modules_count_layers_in_the_whole_model():
    modules = linear_modules(ARCHS["qwen2_moe"], TrtllmMapping(1, 2), 1)
    assert modules == {
        f"transformer.layers.0.{name}.weight": f"transformer.layers.2.{name}"
        for name in (
            "attention.qkv",
            "attention.dense",
            "mlp.fc",
            "mlp.proj",
            "mlp.shared_expert.fc",
            "mlp.shared_expert.proj",
        )
    }


REFUSED = {
    "heads": ("llama", lambda: TrtllmMapping(3), "tp_size=3 does not divide"),
    "experts": ("qwen3_moe", lambda: TrtllmMapping(8, 1, 1, 8), "tp_size=8|moe_ep_size=8"),
    "stages": ("llama", lambda: TrtllmMapping(1, 4), "pp_size=4 leaves stages without any of the model's 3 layers"),
    "sizes": ("qwen3_moe", lambda: TrtllmMapping(4, 1, 3, 0), "is not tp_size=4"),
    "product": ("qwen3_moe", lambda: TrtllmMapping(4, 1, 4, 2), "4 x 2 is not tp_size=4"),
    "zero": ("llama", lambda: TrtllmMapping(0), "tp_size is 0"),
    "text": ("llama", lambda: TrtllmMapping(1, "2"), "pp_size is '2'"),
    "dim": ("llama", lambda: TrtllmMapping(2, 1, 0, 0, True, 2), "embedding_sharding_dim is 2"),
}


@pytest.mark.parametrize(("family", "mapping", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mapping_that_does_not_fit_is_refused(family, mapping, message):
    with pytest.raises(UserError, match=message):
        trtllm_layout(ARCHS[family], mapping(), 0, "bfloat16")
