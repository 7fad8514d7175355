"""The actor with TransformerEngine's layers and optimizer: tests of the actor as they stand, where the hooks are.

With another TransformerEngine up to 2.20: `pip install --no-deps --target FOLDER transformer-engine==2.20.2`, then
`PYTHONPATH=FOLDER pytest -m "" tests/megatron/te`.
"""

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.source import ROOT

pytestmark = [pytest.mark.te, pytest.mark.slow]

LIMIT_S = 800
MEGATRON, INSIDE, STATES, E2E = (
    "tests/megatron",
    "tests/megatron/te/inside.py",
    "tests/megatron/te/states.py",
    "tests/e2e",
)
CRITIC = f"{MEGATRON}/test_critic.py"
LORA = f"{MEGATRON}/test_lora.py"
KINDS = ("plain", "remainders", "low", "hybrid")
MOVES = (
    "plain-remainders-tp2", "remainders-plain-pp2", "low-low-tp2", "plain-low-pp2", "hybrid-hybrid-tp2",
    "remainders-hybrid-pp2", "hybrid-remainders-dp2",
)  # fmt: skip
CHOSEN = [
    # scores are those of transformers
    f"{MEGATRON}/test_model.py::test_log_probabilities_and_entropy_are_those_of_transformers[qwen3-tp2]",
    f"{MEGATRON}/test_model.py::test_log_probabilities_and_entropy_are_those_of_transformers[llama-pp2]",
    f"{MEGATRON}/test_moe.py::test_log_probabilities_and_entropy_are_those_of_transformers[qwen3_moe-ep2]",
    # layers with a dense MLP before those with experts, a biased sigmoid router
    f"{MEGATRON}/test_moe.py::test_log_probabilities_and_entropy_are_those_of_transformers[glm4_moe-ep2]",
    f"{MEGATRON}/test_moe.py::test_log_probabilities_and_entropy_are_those_of_transformers[qwen3_moe_mixed-ep2_pp2]",
    # sliding windows, in some layers
    f"{MEGATRON}/test_model.py::test_log_probabilities_and_entropy_are_those_of_transformers[mistral-tp2_pp2]",
    f"{MEGATRON}/test_model.py::test_log_probabilities_and_entropy_are_those_of_transformers[qwen2_windows-single]",
    f"{MEGATRON}/test_context_parallel.py::test_scores_and_updates_are_those_of_one_rank[cp2-qwen3_windows]",
    # positions with an attention factor, which the fused rotary embedding lacks, and of a part of a head
    *(
        f"{MEGATRON}/test_structures.py::test_log_probabilities_and_gradients_are_those_of_transformers[{case}]"
        for case in ("yarn_all-cp2", "phi4_mini-tp2_pp2", "phi3_partial-single")
    ),
    # latent attention, with another epsilon than the other norms
    *(
        f"{MEGATRON}/test_structures.py::test_log_probabilities_and_gradients_are_those_of_transformers[{case}]"
        for case in ("latent-tp2_pp2", "latent-cp2", "latent_keys-tp2_ep2")
    ),
    # experts that were kept come back to their tokens, each sequence cut over ranks by itself
    f"{MEGATRON}/test_moe_recompute.py::test_updates_replay_what_the_dense_layer_chose_at_the_rollout_weights[cp2_ep2]",
    # scores and gradients of packed sequences are those of the local spec
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[tp2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[tp2_sp]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[pp2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[cp2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[ep2]",
    # attention with sinks, and with two rotary bases, is that of the local layers
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[sinks_tp2_ep2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[norms_tp2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[norms_cp2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[latent_tp2_ep2]",
    f"{INSIDE}::test_scores_and_gradients_are_those_of_the_local_spec[latent_cp2]",
    f"{INSIDE}::test_bf16_scores_are_near_those_of_the_local_spec",
    f"{INSIDE}::test_where_cudnn_takes_no_packed_sequences_there_is_no_fit_attention",
    f"{INSIDE}::test_attention_is_chosen_for_the_configured_exchange_of_keys[None]",
    f"{INSIDE}::test_attention_is_chosen_for_the_configured_exchange_of_keys[p2p]",
    f"{INSIDE}::test_attention_is_chosen_for_the_configured_exchange_of_keys[a2a]",
    f"{INSIDE}::test_where_only_slow_attention_takes_shared_tokens_each_sequence_is_computed_alone",
    # tokens that sequences share, once: losses and gradients are those of each sequence alone
    *(
        f"{MEGATRON}/test_prefix_grouper.py::test_losses_and_gradients_are_those_of_each_sequence_alone[{case}]"
        for case in ("tp2_sp", "pp2", "cp2_recomputed", "cp2_experts", "windows", "cp2_windows")
    ),
    # a critic: values, loss and gradients are those of transformers, and it goes on at another layout
    *(
        f"{CRITIC}::test_values_loss_and_gradients_are_those_of_transformers[{case}]"
        for case in ("qwen2-tp2_pp2", "qwen3-cp2", "qwen2_moe-tp2_ep2_pp2")
    ),
    f"{CRITIC}::test_a_critic_saved_at_tp2_goes_on_at_pp2_and_is_read_as_what_it_is",
    # fusions, and communication behind computation
    f"{INSIDE}::test_what_is_on_by_itself_changes_no_number[qwen2_untied]",
    f"{INSIDE}::test_what_is_on_by_itself_changes_no_number[qwen3_moe]",
    f"{MEGATRON}/test_ddp.py::test_whoever_reads_weights_between_updates_has_them_whole",
    # training
    f"{MEGATRON}/test_offload.py::test_training_goes_on_as_if_nothing_had_left[ep2]",
    # checkpoint and resume
    f"{INSIDE}::test_a_checkpoint_of_grouped_experts_and_a_fused_adam_holds_tensors_only",
    f"{MEGATRON}/test_checkpoint.py::test_training_goes_on_at_another_layout[qwen3-dp2-pp2]",
    f"{MEGATRON}/test_checkpoint.py::test_an_optimizer_that_never_stepped_is_saved_and_loaded",
    f"{MEGATRON}/test_checkpoint.py::test_an_optimizer_of_the_other_kind_goes_on_with_the_same_numbers"
    "[0-float32-dp2-True-dp2-False]",
    f"{MEGATRON}/test_moe_checkpoint.py::test_training_goes_on_where_the_experts_lie_otherwise[every layer-single]",
    f"{MEGATRON}/test_moe_checkpoint.py::test_sinks_and_biases_of_experts_go_on_where_they_lie_otherwise[single-targets0]",
    # states of 2 bytes, and on the host
    *(f"{STATES}::test_a_resumed_run_is_the_one_that_went_on[{kind}]" for kind in KINDS),
    *(f"{STATES}::test_its_steps_are_those_of_the_plain_optimizer[{kind}]" for kind in KINDS[1:]),
    *(f"{STATES}::test_after_other_weights_came_masters_are_these[{kind}]" for kind in KINDS),
    *(f"{STATES}::test_memory_is_what_a_rank_holds[{kind}]" for kind in KINDS),
    *(f"{STATES}::test_another_layout_and_another_kind_hold_the_same_states[{move}]" for move in MOVES),
    f"{STATES}::test_a_float16_state_that_is_saved_has_the_scale_of_one_that_is_loaded",
    # low-rank adapters: behind a fused norm, of grouped experts, in every layout
    *(f"{LORA}::test_layouts[{layout}]" for layout in ("tp2", "tp2_pp2", "dp2")),
    *(f"{LORA}::test_expert_layouts[{layout}]" for layout in ("ep2", "tp2_ep2_etp2")),
    f"{LORA}::test_scores_and_gradients_are_those_of_transformers_with_merged_weights[qwen3]",
    f"{LORA}::test_updates_of_experts[tp2_ep2]",
    *(f"{LORA}::test_updates_of_adapters_that_experts_share[{layout}-{{}}]" for layout in ("tp2_ep2", "tp2_ep2_etp2")),
    # a whole run: refit into the engine, kill -9 and resume
    f"{E2E}/test_resume.py::test_a_killed_run_continues_as_if_nothing_had_happened[5]",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Test -> its failure's text, None where it passed; "" stands for what pytest said."""
    folder = tmp_path_factory.mktemp("te")
    words = ["-m", "pytest", "-q", "-m", "", "-p", "tests.megatron.te.active", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *words, f"--junitxml={folder / 'outcomes.xml'}", f"--basetemp={folder / 'tmp'}", *CHOSEN],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = {"": done.stdout[-4000:] + done.stderr[-4000:]}
    if (folder / "outcomes.xml").is_file():
        for case in ElementTree.parse(folder / "outcomes.xml").iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            found[name] = next((each.text or each.tag for each in case), None)
    return found


@pytest.mark.parametrize("name", CHOSEN, ids=[name.rpartition("/")[2] for name in CHOSEN])
def test_the_actor_passes_with_transformer_engine(name, outcomes):
    failure = outcomes.get(name, outcomes[""])
    if failure is not None:
        pytest.fail(failure, pytrace=False)
