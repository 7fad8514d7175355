"""A student's divergence from its teachers in every layout is that of transformers' models in float64.

Two teachers, each with its own sequences: one is a set of weights in the student's modules, the other a model of
another family. Values and gradients over a split vocabulary in float64 are in
`algorithms/functional/test_divergences.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
import transformers

from mrl.algorithms._distillation import DUAL_CLIP, Distillation
from mrl.algorithms.functional.logprobs import VocabShard
from mrl.config.config import SAMPLED as SAMPLED_MODES
from mrl.config.config import DistillationLossConfig
from mrl.megatron.distillation_targets import DistillationSpec, DistillationTargets
from mrl.megatron.teacher import SeparateTeacher, SharedWeightTeacher
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import output_name
from mrl.resharding.random_init import random_init
from mrl.trainer.teachers import joined
from mrl.trainer.validation.forward_only import forward_only_config
from tests.algorithms.functional.test_divergences import Peak, by_definition
from tests.layouts import groups_of
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    _whole,
    algorithm,
    config_for,
    full_gradients,
    make_batch,
    make_policy,
    own_part,
)
from tests.ranks import run_ranks

EXACT = 1e-6  # the project's bound; fp32 through two layers against float64: 2e-7 is found
SAMPLED = 2e-6  # of the sampled token's modes, whose signs cancel: 6e-7 is found
GRADIENT = 3e-6  # of the gradient's norm, all parameters as one vector
# key/value heads that four ranks can share
STUDENT, OTHER = (replace(ARCHS[name], num_heads=4, num_kv_heads=4, num_layers=2) for name in ("qwen2_untied", "qwen3"))
TEMPERATURE, TOPK, LOW, CLAMP = 0.8, 7, -6.0, 3.0
LAYOUTS = {
    "dp2": ParallelLayout(2),
    "tp2": ParallelLayout(2, tp=2),
    "tp4": ParallelLayout(4, tp=4),
    "pp2": ParallelLayout(2, pp=2),
    "cp2": ParallelLayout(2, cp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
}
MODES = {
    "reverse_kl": {},
    "forward_kl": {},
    "jsd": {"beta": 0.3},
    "forward_kl_topk": {"topk": TOPK, "log_prob_min_clamp": LOW},
    "k2": {"loss_max_clamp": CLAMP},
    "k3": {},
    "abs": {},
    "k1": {"use_policy_gradient": True},
}
OPTIONS = {
    "actor": {"clip_grad": 0.0, "use_distributed_optimizer": False},
    "rollout": {"temperature": TEMPERATURE},
}


def taught(grid, *, same=False):
    """A student and its teachers, on these ranks; `same`: one teacher, with the student's weights."""
    groups = groups_of(grid)
    policy = make_policy(STUDENT, grid, groups=groups, **OPTIONS)
    lodger = SharedWeightTeacher(policy, STUDENT)
    if same:
        for name, tensor in policy.named_tensors().items():
            lodger.tensors()[name].copy_(tensor)
        return policy, [lodger]
    guest = SeparateTeacher(
        forward_only_config(config_for(grid, **OPTIONS)), OTHER, groups, torch.device("cpu"), policy
    )
    for seed, teacher in enumerate((lodger, guest), start=21):
        random_init(teacher.arch, teacher.model.layout(), teacher.tensors(), seed)
        for name, tensor in teacher.tensors().items():
            if tensor.dim() == 2 and "norm" not in name:
                tensor.mul_(5)
    return policy, [lodger, guest]


def batch_of(num_teachers):
    batch = make_batch()
    batch.teacher_B = torch.arange(batch.num_sequences) // 2 % num_teachers
    return batch


def numbers(grid, same=False):
    """Mode -> metrics of an update of the loss alone, and its gradients; weights of student and teachers."""
    policy, teachers = taught(grid, same=same)
    weights = [
        _whole(policy.layout(), policy.named_tensors()),
        *(_whole(teacher.model.layout(), teacher.tensors()) for teacher in teachers),
    ]
    batch = own_part(batch_of(len(teachers)), policy)
    parts = {
        index: batch.select((batch.teacher_B == index).nonzero().flatten().tolist()) for index in range(len(teachers))
    }
    batch.teacher_logprobs_R = joined(batch, {index: teachers[index].logprobs(part) for index, part in parts.items()})
    batch.teacher_states_R = joined(
        batch, {index: teachers[index].final_hidden_states(part) for index, part in parts.items()}
    )
    last = grid.pp == 1 or policy._is_last_stage
    outputs = [dict(teacher.tensors())[output_name(teacher.tensors())].clone() for teacher in teachers] if last else []
    policy.start_optimizer(replace(CONSTANT, peak=0.0))
    found = {}
    for mode, more in MODES.items():
        loss = DistillationLossConfig(loss_mode=mode, use_task_rewards=False, **more)
        policy._distillation = Distillation(loss)
        policy.distillation = None if loss.is_sampled else DistillationSpec(loss, TEMPERATURE, 16, outputs)
        found[mode] = policy.update(batch, algorithm()), full_gradients(policy)
    return found, weights


def dense(arch, weights):
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    model.load_state_dict(weights, strict=not arch.tie_word_embeddings)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def by_transformers():
    """Mode -> loss and gradients."""
    weights = run_ranks(2, numbers, LAYOUTS["tp2"])[0][1]
    student = dense(STUDENT, weights[0])
    teachers = [dense(STUDENT, weights[1]), dense(OTHER, weights[2])]
    batch = batch_of(2)
    lens = batch.response_lens_B.tolist()
    rows = zip(batch.tokens_P.split(batch.seq_lens_B.tolist()), batch.prompt_lens_B.tolist(), strict=True)
    per_R = zip(batch.weights_R.double().split(lens), batch.rollout_logprobs_R.double().split(lens), strict=True)
    losses = dict.fromkeys(MODES, 0.0)
    for (tokens, prompt), (weight, old), teacher in zip(rows, per_R, batch.teacher_B.tolist(), strict=True):
        x, y = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE for model in (student, teachers[teacher]))
        y = y.detach()
        log_p, log_q = x.log_softmax(1), y.log_softmax(1)
        target = tokens[prompt:, None]
        d = (log_p.gather(1, target) - log_q.gather(1, target)).squeeze(1)
        best = log_q.topk(TOPK)
        q, p = best.values.clamp(min=LOW), log_p.gather(1, best.indices).clamp(min=LOW)
        ratio = (log_p.gather(1, target).squeeze(1) - old).exp()
        plain, clipped = d.detach() * ratio, d.detach() * ratio.clamp(0.8, 1.2)
        surrogate = torch.maximum(plain, clipped)
        surrogate = torch.where(d > 0, torch.minimum(surrogate, DUAL_CLIP * d.detach()), surrogate)
        of_mode = {
            "reverse_kl": by_definition(x, y, "reverse_kl", 0.5),
            "forward_kl": by_definition(x, y, "forward_kl", 0.5),
            "jsd": by_definition(x, y, "jsd", 0.3),
            "forward_kl_topk": (q.exp() * (q - p)).sum(1).clamp(min=0),
            "k2": (d * d / 2).clamp(max=CLAMP),
            "k3": ((-d).exp() - 1 + d).clamp(max=10),
            "abs": d.abs(),
            "k1": surrogate,
        }
        for mode, loss in of_mode.items():
            losses[mode] = losses[mode] + (weight * loss).sum()
    found = {}
    for mode, loss in losses.items():
        names, parameters = zip(*student.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        found[mode] = loss.item(), dict(zip(names, gradients, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_of_every_mode_are_those_of_transformers(layout, by_transformers):
    grid = LAYOUTS[layout]
    for found, _ in run_ranks(grid.world_size, numbers, grid):
        for mode, (loss, gradients) in by_transformers.items():
            metrics, ours = found[mode]
            bound = SAMPLED if mode in SAMPLED_MODES else EXACT
            assert metrics["distillation/loss"] == pytest.approx(loss, rel=bound), mode
            assert metrics["actor/loss"] == pytest.approx(loss, rel=bound), mode
            norm = norm_of(gradients.values())
            assert norm > 0
            assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=bound), mode
            assert ours.keys() == gradients.keys()
            assert norm_of(ours[name].double() - gradients[name] for name in ours) <= GRADIENT * norm, mode
            assert metrics["distillation/loss_min"] <= metrics["distillation/loss_max"]


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


@pytest.mark.parametrize("mode", ["reverse_kl", "forward_kl", "jsd", "forward_kl_topk"])
def test_two_teachers_never_make_logits_of_all_tokens(mode):
    rows, tokens, chunk = 64, 512, 8
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(tokens, 4, requires_grad=True)
    loss = DistillationLossConfig(loss_mode=mode, topk=5)
    how = DistillationSpec(loss, TEMPERATURE, chunk, [torch.randn(tokens, 6), torch.randn(tokens - 9, 3)])
    compared = DistillationTargets(how, torch.arange(rows) % 2, torch.randn(rows, 6))
    with Peak() as peak:
        scores = compared.scores(hidden, weight, torch.arange(rows), VocabShard(0, tokens))
        scores[0].sum().backward()
    assert chunk * (tokens - 9) <= peak.largest <= chunk * tokens < rows * tokens / 4
    assert len(scores) == how.num_scores and hidden.grad.abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_a_teacher_with_the_students_weights_teaches_nothing(layout):
    """Exactly: not a bit of the weights moves."""
    grid = LAYOUTS[layout]
    for found, _ in run_ranks(grid.world_size, numbers, grid, same=True):
        for mode in ("reverse_kl", "forward_kl", "jsd", "k2", "k3", "abs", "k1"):
            metrics, _ = found[mode]
            assert metrics["distillation/loss"] == metrics["actor/grad_norm"] == 0, mode
