"""Where verl's rewards come from, in mrl's words: functions, or a reward model in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.from_verl.rollout import Pair
from mrl.from_verl.verl_run import VerlRun

_TOKENIZER = "reward_model.model.input_tokenizer"


def reward(verl: VerlRun) -> Iterator[Pair]:
    """Fields of `reward`, and DAPO's buffer, which verl has among them."""
    yield from list(_model(verl)) or _functions(verl)
    for prefix in ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg.",
                   "reward.reward_kwargs.overlong_buffer_cfg."):  # fmt: skip
        if verl[f"{prefix}enable"] and not verl[f"{prefix}len"]:
            verl.notes[f"{prefix}enable"] = f"it needs a length, {prefix}len"
        elif verl[f"{prefix}enable"]:
            yield "algorithm.overlong.buffer_length", verl[f"{prefix}len"]
            yield "algorithm.overlong.penalty", verl[f"{prefix}penalty_factor"]


def _model(verl: VerlRun) -> Iterator[Pair]:
    """In place of functions, as in verl: with a function of the user's it is a server that this function asks."""
    for prefix, names in (("reward.reward_model.", ("model_path",)), ("reward_model.", ("model_path", "model.path"))):
        path = next((verl[prefix + name] for name in names if verl[prefix + name]), None)
        if verl[f"{prefix}enable"] is not True or path is None:
            if verl[f"{prefix}enable"] or path is not None:
                verl.notes[f"{prefix}enable"] = f"a reward model needs both {prefix}enable=True and its path"
            continue
        if any(verl[f"{one}custom_reward_function.path"] for one in ("", "reward.")):
            verl.notes[f"{prefix}enable"] = (
                "the function there asks a server of it; here a reward model adds its score, `reward.model.path`"
            )
            return
        yield "reward.functions", []
        yield "reward.model.path", path
        yield "reward.model.retokenize", verl.given.get(_TOKENIZER, path) is not None  # verl renders the text anew
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
        function = {"name": "math"}
        verl.notes["custom_reward_function.path"] = (
            "not set: verl then chooses a function of its own by the data source; here `math` compares the response's "
            "last expression with the answer"
        )
    if "batch" in (verl.given.get("reward_model.reward_manager"), verl.given.get("reward.reward_manager.name")):
        function["batch"] = "replica"
    yield "reward.functions", [function]
