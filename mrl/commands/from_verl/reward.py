"""Translates verl's rewards: functions, or a reward model instead of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.commands.from_verl.rollout import Pair
from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.verl_reward import MANAGERS

DEFAULT = "by_data_source"
"""mrl's counterpart of verl's `default_compute_score`."""
METRIC = "algorithm.filter_groups.metric"
SCORED = ("acc", "score")
"""Metrics that verl compares before it adds anything to the score."""
SUMMED = ("reward", "seq_reward", "seq_final_reward")
"""Metrics that include the overlong penalty."""
_MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name")
_OVERLONG = ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg.",
             "reward.reward_kwargs.overlong_buffer_cfg.", "reward.overlong_buffer.",
             "custom_reward_function.overlong_buffer.")  # fmt: skip
_TOKENIZER = "reward_model.model.input_tokenizer"


def reward(verl: VerlRun) -> Iterator[Pair]:
    """Yields fields of `reward`, and DAPO's overlong buffer, which verl has among them."""
    yield from list(_model(verl)) or _functions(verl)
    for key in _MANAGERS:
        if (name := verl.given.get(key)) is None:
            continue
        if name in MANAGERS:
            verl.decided[key] = f"{name}: {MANAGERS[name]}"
        else:
            verl.notes[key] = (
                f"mrl has no such reward manager (it has {', '.join(MANAGERS)}): implement it as a function in "
                "reward.functions"
            )
    for prefix in _OVERLONG:
        if verl[f"{prefix}enable"] and not verl[f"{prefix}len"]:
            verl.notes[f"{prefix}enable"] = f"it needs a length, {prefix}len"
        elif verl[f"{prefix}enable"]:
            yield "algorithm.overlong.buffer_length", verl[f"{prefix}len"]
            yield "algorithm.overlong.penalty", verl[f"{prefix}penalty_factor"]


def differs(verl: VerlRun, algorithm: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what was translated but has another value or effect in mrl: scores, and how groups are compared.

    Args:
        verl: Settings of the run.
        algorithm: Section `algorithm` of the translation.
        functions: `reward.functions` of the translation.
    """
    penalty = bool(algorithm.get("overlong", {}).get("buffer_length"))
    if not algorithm.get("dynamic_sampling"):
        return
    metric = str(verl[METRIC])
    added = ["the overlong penalty"] * penalty + ["the KL in the reward"] * (algorithm.get("kl_in") == "reward")
    own = any(":" in str(one.get("name")) for one in functions)
    same = "mrl compares the rewards of a group before the overlong penalty and the KL are added"
    if metric in SCORED and not own:
        verl.decided[METRIC] = f"{metric}: {same}, which is the same"
    elif metric in SCORED:
        yield (
            f"{METRIC}={metric}: verl drops a group whose responses all have the same '{metric}' from the function; "
            f"mrl drops it if all have the same score. Check that the function's '{metric}' and its score agree"
        )
    elif metric in SUMMED and not added:
        verl.decided[METRIC] = f"{metric}: nothing is added to the scores in this run, so that groups are the same"
    elif metric in SUMMED:
        yield (
            f"{METRIC}={metric}: verl compares rewards with {' and '.join(added)}; {same}. verl keeps a group of "
            "right answers of which some are too long, mrl drops it"
        )
    else:
        yield f"{METRIC}={metric}: verl compares '{metric}', which the reward function returns; {same}"


def _manager(verl: VerlRun) -> str | None:
    """Returns the name of the reward manager, or None if it is not set."""
    return next((str(verl.given[key]) for key in _MANAGERS if verl.given.get(key) is not None), None)


def _model(verl: VerlRun) -> Iterator[Pair]:
    """Yields the fields of a reward model, which replaces the functions; a function of verl would query it."""
    for prefix, names in (("reward.reward_model.", ("model_path",)), ("reward_model.", ("model_path", "model.path"))):
        path = next((verl[prefix + name] for name in names if verl[prefix + name]), None)
        if verl[f"{prefix}enable"] is not True or path is None:
            if verl[f"{prefix}enable"] or path is not None:
                verl.notes[f"{prefix}enable"] = f"a reward model needs both {prefix}enable=True and its path"
            continue
        if any(verl[f"{one}custom_reward_function.path"] for one in ("", "reward.")):
            verl.notes[f"{prefix}enable"] = (
                "verl's function queries it as a server; in mrl a reward model adds its score (`reward.model.path`)"
            )
            return
        yield "reward.functions", []
        yield "reward.model.path", path
        # verl renders the text again with the reward model's tokenizer
        yield "reward.model.retokenize", verl.given.get(_TOKENIZER, path) is not None
        return


def _functions(verl: VerlRun) -> Iterator[Pair]:
    prefix = "reward." if verl["reward.custom_reward_function.path"] else ""
    path = verl[f"{prefix}custom_reward_function.path"]
    if path:
        name = verl[f"{prefix}custom_reward_function.name"] or "compute_score"
        function: dict[str, Any] = {"name": f"{path}:{name}"}
        if kwargs := verl.under(f"{prefix}custom_reward_function.reward_kwargs."):
            function["kwargs"] = kwargs
    else:
        function = {"name": DEFAULT}
        verl.decided["custom_reward_function.path"] = (
            f"not set: verl scores a row by its '{verl['data.reward_fn_key']}', as mrl's {DEFAULT} does; another data "
            "source is an error in both. Formulas are compared by value, in verl by their normalized texts"
        )
    if _manager(verl) == "batch":
        function["batch"] = "replica"
    yield "reward.functions", [function]
