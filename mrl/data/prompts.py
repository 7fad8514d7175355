"""The prompt stream of a run: turns rows into prompts of token ids, in an order that a resume repeats exactly.

`PromptEncoder` turns one row into a `Prompt`, `PromptSource` is the training stream, and `load_validation` reads the
held-out prompts. The stream is endless: `prompt_order.py` gives the row at position p, and p is the prompt's uid. Its
state is one number (and what `reward_order.py` adds), and a row is tokenised only when the stream reaches it. Every
rank runs the same source and sees the same prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from mrl.config.config import DataConfig, orders_by_rewards
from mrl.config.did_you_mean import did_you_mean
from mrl.data.conversations import Messages, describe_value, pair_prompt, parse_messages, split_conversation
from mrl.data.hub_files import paths_of
from mrl.data.media import refuse_media
from mrl.data.prompt_order import (
    EpochOrder,
    MixedOrder,
    PromptOrder,
    Share,
    SortedOrder,
    call_here,
    column_values,
)
from mrl.data.public_sets.base import Row
from mrl.data.reward_order import RewardOrder
from mrl.data.row_sources import ChainedRows, ChosenRows, RowSource, TaskRows, open_files
from mrl.data.synthetic_tasks import make_task
from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError
from mrl.types import Prompt

DATA_SOURCE = "data_source"
"""Column of verl's data files that names the data set of a row."""

VERL_ANSWER = "reward_model.ground_truth"
"""Column of verl's data files that has the answer; a value that is neither text nor a number is encoded as JSON."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that the model may call."""

VALIDATION_UID = 1 << 48
"""uid of the first held-out prompt; uids of training prompts are smaller."""


class PromptEncoder:
    """Converter from data rows to prompts, configured by `DataConfig`."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, prompt_length: int, tools: Tools = ()) -> None:
        """Creates the converter.

        Args:
            data: Column names, system prompt, and the treatment of long prompts.
            tokenizer: Encodes the prompts.
            prompt_length: Longest prompt, tokens (`rollout.prompt_length`).
            tools: Function schemas that the chat template includes in the prompt.
        """
        self._tools = tools
        self._data = data
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        # Rows of a task always have these columns; the config's keys name columns of files.
        self._prompt_key = data.prompt_key if data.task is None else "prompt"
        self._answer_key = data.answer_key if data.task is None else "answer"

    def check(self, row: Row, source: str) -> None:
        """Raises UserError where a row lacks a column or a column has the wrong type. Does not tokenise."""
        refuse_media(row, source)
        self._prompt_content(row, source)
        self._answer(row, source)
        self._data_source(row, source)

    def encode(self, row: Row, source: str, uid: int, data_source: str) -> Prompt | None:
        """Returns the prompt of a row; None where it is too long and `data.overlong_prompts` is "drop".

        Args:
            row: Values by column name.
            source: File and line of the row, for error messages.
            uid: Position of the row in the stream.
            data_source: Data set name for rows that have none.

        Raises:
            UserError: The row cannot be used; the message names the row and the remedy.
        """
        refuse_media(row, source)
        question = self._prompt_content(row, source)
        answer = self._answer(row, source)
        named = self._data_source(row, source)
        try:
            if isinstance(question, str):
                ids, text = self._tokenizer.encode(question, prompt=True), question
            else:
                ids = self._tokenizer.apply_chat_template(question, self._tools)
                text = self._tokenizer.decode(ids)
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
        if not ids:
            raise UserError(f"{source}: the prompt {text!r} encodes to no tokens. Remove the row or give it a text.")
        if len(ids) > self._prompt_length:
            if self._data.overlong_prompts == "drop":
                return None
            if self._data.overlong_prompts == "error":
                raise UserError(
                    f"{source}: the prompt has {len(ids)} tokens, more than rollout.prompt_length={self._prompt_length}"
                    ". Raise it, or set data.overlong_prompts to 'drop' or 'truncate_left'."
                )
            ids = ids[-self._prompt_length :]
            text = self._tokenizer.decode(ids)
        used = {
            self._prompt_value(row, source)[1],
            self._prompt_key.partition(".")[0],
            self._answer_column(row).partition(".")[0],
        }
        extra = {name: value for name, value in row.items() if name not in used}
        return Prompt(uid, tuple(ids), text, answer, extra, source, named or data_source, question, row)

    def _prompt_content(self, row: Row, source: str) -> str | Messages:
        """Returns the prompt as a string to encode unchanged, or as messages for the chat template."""
        data = self._data
        value, key = self._prompt_value(row, source)
        if isinstance(value, str):
            if data.apply_chat_template == "always":
                return self._with_system([{"role": "user", "content": value}])
            if data.system_prompt is not None:
                raise UserError(
                    f"{source}: data.system_prompt is set, but the prompt is a plain string and gets no system prompt. "
                    "Set data.apply_chat_template=always, or data.system_prompt=null."
                )
            return value
        messages = parse_messages(value, source, f"column '{key}'")
        if data.apply_chat_template == "never":
            raise UserError(
                f"{source}: column '{key}' holds chat messages, which need the chat template, but "
                "data.apply_chat_template=never. Set it to auto, or use strings."
            )
        return self._with_system(messages)

    def _prompt_value(self, row: Row, source: str) -> tuple[Any, str]:
        """Returns the prompt of a row (a string or messages) and the column that it comes from."""
        conversation = split_conversation(row, source, self._data)
        if conversation is not None:
            return conversation[0], self._data.messages_key
        start = None if self._data.task is not None else pair_prompt(row, source, self._data)
        if start is not None:
            return start, self._data.chosen_key
        return _column(row, self._prompt_key, source, "data.prompt_key"), self._prompt_key

    def _with_system(self, messages: Messages) -> Messages:
        if self._data.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._data.system_prompt}, *messages]

    def _answer(self, row: Row, source: str) -> str | None:
        """Returns the answer as a string; None where the row has none.

        Numbers are accepted; an integer in a float column (49.0) becomes "49". Without an answer column, the answer of
        a conversation (`data.messages_key`) is its last assistant message, and a preference pair has no answer.
        """
        if not self._answer_key:
            return None
        key = self._answer_column(row)
        if key == "answer" not in row and (conversation := split_conversation(row, source, self._data)) is not None:
            said: str = conversation[1][0]["content"]
            return said
        keys = self._data.chosen_key, self._data.rejected_key
        if key == "answer" not in row and (keys != ("chosen", "rejected") or any(name in row for name in keys)):
            return None
        value = _column(row, key, source, "data.answer_key")
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        if isinstance(value, Decimal) and value.is_finite():
            return format(value.normalize(), "f")
        if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
            return str(value)
        if key == VERL_ANSWER:
            return json.dumps(value, ensure_ascii=False, default=str)
        raise UserError(
            f"{source}: column '{key}' holds {describe_value(value)}, expected a string or a number (data.answer_key)."
        )

    def _answer_column(self, row: Row) -> str:
        """Returns the answer's column: `data.answer_key`; verl's where that is "answer" and the row lacks it."""
        if self._answer_key != "answer" or "answer" in row:
            return self._answer_key
        model = row.get("reward_model", {})
        if isinstance(model, dict):
            return VERL_ANSWER if "ground_truth" in model else self._answer_key
        has_other = self._data.messages_key in row or self._data.chosen_key in row
        return VERL_ANSWER if model is None and not has_other else self._answer_key

    def _data_source(self, row: Row, source: str) -> str | None:
        """Returns the data set name that the row states, if any."""
        key = self._data.source_key or DATA_SOURCE
        if self._data.source_key is None and row.get(key) is None:
            return None
        value = _column(row, key, source, "data.source_key")
        if isinstance(value, str) and value.isprintable() and value.strip():
            return value
        raise UserError(
            f"{source}: column '{key}' holds {describe_value(value)}, expected the name of a data set, such as "
            "'openai/gsm8k' (data.source_key)."
        )


class PromptSource:
    """The endless stream of training prompts. Its state (`state_dict`) is the number of rows used so far.

    An order by past rewards also has totals and epochs in its state.
    """

    def __init__(
        self, rows: RowSource, encoder: PromptEncoder, *, seed: int, shuffle: bool, order: PromptOrder | None = None
    ) -> None:
        """Creates the stream at position 0.

        Args:
            rows: RowSource of one epoch, at least one.
            encoder: Turns rows into prompts.
            seed: Seed of the shuffled order, together with the epoch (`run.seed`).
            shuffle: True to permute the rows; False keeps the order of the files.
            order: Order of the rows, made with this seed; None for epochs as `shuffle` says.
        """
        self._rows = rows
        self._encoder = encoder
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order = order or EpochOrder(len(rows), seed, shuffle=shuffle)

    @property
    def position(self) -> int:
        """Number of rows used so far, including dropped ones. The next prompt's uid is at least this."""
        return self._position

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch."""
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Hash of the content of the rows."""
        return self._rows.fingerprint

    @property
    def conversions(self) -> tuple[str, ...]:
        """Names of the public data sets whose raw rows are converted."""
        return self._rows.conversions

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far, fractional."""
        return self._position / len(self._rows)

    def next(self, num_prompts: int, share: Share = call_here) -> list[Prompt]:
        """Returns the next prompts and advances the position. The position stays unchanged if this raises.

        Args:
            num_prompts: Number of prompts; rows that are dropped as too long do not count.
            share: Calls a function of the user on one of the ranks that draw, and returns its result on all of them.

        Raises:
            UserError: A row cannot be used, all rows of an epoch were dropped as too long, or the function of
                `data.order_by` failed.
        """
        prompts: list[Prompt] = []
        position, dropped = self._position, 0
        while len(prompts) < num_prompts:
            self._order.prepare(position, share)
            index = self._order.row_at(position)
            rows = self._rows
            prompt = self._encoder.encode(rows.row(index), rows.source(index), position, rows.data_source(index))
            position += 1
            if prompt is not None:
                prompts.append(prompt)
                dropped = 0
                continue
            dropped += 1
            if dropped == len(self._rows):
                raise UserError(
                    f"all {dropped} prompts are longer than rollout.prompt_length and data.overlong_prompts=drop left "
                    "none. Raise rollout.prompt_length or check the data."
                )
        self._position = position
        return prompts

    def at(self, uid: int) -> Prompt:
        """Returns the prompt that `next` returned with this uid, without moving the position.

        Raises:
            UserError: The row cannot be used.
        """
        index, rows = self._order.row_at(uid), self._rows
        prompt = self._encoder.encode(rows.row(index), rows.source(index), uid, rows.data_source(index))
        if prompt is None:
            raise UserError(f"{rows.source(index)} is too long now, but was a prompt before: the data changed.")
        return prompt

    def peek(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts, at most one epoch of them, without moving the position.

        Args:
            num_prompts: Number of prompts.

        Raises:
            UserError: Same as `next`; if one of the first rows of the data is bad too, the message names that row
                instead.
        """
        position = self._position
        try:
            return self.next(min(num_prompts, len(self._rows)))
        except UserError:
            self.first(num_prompts)
            raise
        finally:
            self._position = position
            self._order.rewind(position)

    def check_order(self) -> None:
        """Tries the function of `data.order_by`, if any; raises UserError where it fails."""
        self._order.check()

    def record_rewards(self, uids: Iterable[int], rewards: Iterable[float]) -> None:
        """Records the rewards of responses, which may determine the order of the next epochs.

        Args:
            uids: Uid of the prompt of each response.
            rewards: Reward of each response, finite.
        """
        self._order.record(uids, rewards)

    def release(self, uid: int) -> None:
        """Allows forgetting the rows of prompts with smaller uids, for which `at` is not called any more."""
        self._order.release(uid)

    def first(self, num_rows: int) -> list[Prompt]:
        """Returns the prompts of the first rows in file order, without those that are too long.

        Args:
            num_rows: Number of rows to read.

        Raises:
            UserError: A row cannot be used.
        """
        rows = self._rows
        found = [
            self._encoder.encode(rows.row(index), rows.source(index), index, rows.data_source(index))
            for index in range(min(num_rows, len(rows)))
        ]
        return [prompt for prompt in found if prompt is not None]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position together with the hash, order and seed that it refers to, as JSON values."""
        more = self._order.state_dict()
        return {"position": self._position, **self._settings(), **({"order_state": more} if more else {})}

    def _settings(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._rows),
            "fingerprint": self._rows.fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "order": self._order.describe(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the position from `state_dict`.

        Raises:
            UserError: The data, their order or the seed differ from the saved ones, so prompts would be lost or
                repeated.
        """
        own = self._settings()
        if state["fingerprint"] != own["fingerprint"]:
            raise UserError(
                f"the training data changed since the checkpoint: {state['num_rows']} rows with fingerprint "
                f"{state['fingerprint'][:16]} then, {own['num_rows']} rows with {own['fingerprint'][:16]} now. "
                "Put the same files back in data.train_files (or the same data.task), or start a new run.output_dir."
            )
        for name, key in (("shuffle", "data.shuffle"), ("seed", "run.seed")):
            if state[name] != own[name]:
                raise UserError(
                    f"{key} is {own[name]}, but the checkpoint's prompts were ordered with {state[name]}. Set it back, "
                    "or start a new run.output_dir."
                )
        if (order := state.get("order", "")) != own["order"]:
            raise UserError(
                f"the order of the prompts is '{own['order'] or 'by epochs'}', but the checkpoint's was "
                f"'{order or 'by epochs'}'. Set data.train_weights and data.order_by back, or start a new "
                "run.output_dir."
            )
        position = int(state["position"])
        self._order.load_state_dict(state.get("order_state", {}), position)
        self._position = position


def load_training(
    data: DataConfig, tokenizer: Tokenizer, *, prompt_length: int, seed: int, tools: Tools = ()
) -> PromptSource:
    """Returns the training stream of a config.

    Args:
        data: Names a task or files.
        tokenizer: Encodes the prompts.
        prompt_length: Longest prompt, tokens (`rollout.prompt_length`).
        seed: Seed of the order of each epoch (`run.seed`).
        tools: Function schemas that the chat template includes in the prompt.

    Raises:
        UserError: The config names no data, or both a task and files; or the data cannot be used.
    """
    encoder = PromptEncoder(data, tokenizer, prompt_length, tools)
    if data.task is None and not data.train_files:
        raise UserError("data.train_files is empty and data.task is null: there are no prompts. Set one of them.")
    if data.task is not None and (data.train_files or data.val_files):
        raise UserError(
            f"data.task='{data.task}' and data.train_files or data.val_files are both set; a task makes its own rows. "
            "Set data.task=null to use the files."
        )
    rows = _rows(data, encoder, "train")
    if not len(rows):
        raise UserError(f"data.task='{data.task}' makes no training rows.")
    order = _order(data, rows, seed)
    return PromptSource(rows, encoder, seed=seed, shuffle=data.shuffle, order=order)


def load_validation(data: DataConfig, tokenizer: Tokenizer, *, prompt_length: int, tools: Tools = ()) -> list[Prompt]:
    """Returns all held-out prompts in order, with uids from `VALIDATION_UID`; empty where the config names none.

    Raises:
        UserError: The data cannot be used, or every prompt is too long.
    """
    if data.task is None and not data.val_files:
        return []
    encoder = PromptEncoder(data, tokenizer, prompt_length, tools)
    rows = _rows(data, encoder, "val")
    encoded = [
        encoder.encode(rows.row(index), rows.source(index), VALIDATION_UID + index, rows.data_source(index))
        for index in range(len(rows))
    ]
    prompts = [prompt for prompt in encoded if prompt is not None]
    if encoded and not prompts:
        raise UserError(
            f"data.val_files: all {len(encoded)} prompts are longer than rollout.prompt_length={prompt_length} and "
            "data.overlong_prompts=drop left none. Raise rollout.prompt_length or check the data."
        )
    return prompts


def _order(data: DataConfig, rows: RowSource, seed: int) -> PromptOrder:
    """Returns the order of the training rows that the config selects."""
    epochs = EpochOrder(len(rows), seed, shuffle=data.shuffle)
    if data.order_by is not None and orders_by_rewards(data):
        return RewardOrder(rows, data.order_by, epochs)
    if data.order_by is not None:
        return SortedOrder(column_values(rows, data.order_by), data.order_by, epochs)
    if len(data.train_weights) > 1 and isinstance(rows, ChainedRows):
        return MixedOrder(rows.sizes, data.train_weights, seed, shuffle=data.shuffle)
    return epochs


def _rows(data: DataConfig, encoder: PromptEncoder, side: str) -> RowSource:
    """Returns the rows of a side, of which `train_max_samples` or `val_max_samples` may choose some."""
    rows = _all_rows(data, encoder, side)
    most = data.train_max_samples if side == "train" else data.val_max_samples
    return rows if most is None or most >= len(rows) else ChosenRows(rows, most, shuffle=data.shuffle)


def _all_rows(data: DataConfig, encoder: PromptEncoder, side: str) -> RowSource:
    if data.task is None:
        files = data.train_files if side == "train" else data.val_files
        own_columns = data.prompt_key != "prompt" or data.answer_key not in ("answer", "")
        key, check, convert = f"data.{side}_files", encoder.check, not own_columns
        parts = [open_files(paths_of(text, side), key, check, convert=convert) for text in files]
        return parts[0] if len(parts) == 1 else ChainedRows(parts)
    task = make_task(data.task, data.task_kwargs)
    rows = TaskRows(task, data.task, data.task_kwargs, side)
    if len(rows):
        encoder.check(rows.row(0), rows.source(0))
    return rows


PROMPT_NAMES = ("question", "problem", "instruction", "query", "input")
"""Names that other data sets give the column of the prompt."""


def _prompt_hint(key: str, row: Row, config_key: str) -> str:
    """Returns the end of an error message with the column that has the prompt; "" unless exactly one is named so."""
    if config_key != "data.prompt_key" or key != DataConfig.prompt_key:
        return ""
    found = [name for name in row if name.lower() in PROMPT_NAMES]
    return f" If '{found[0]}' is the prompt, set data.prompt_key={found[0]}." if len(found) == 1 else ""


def _column(row: Row, key: str, source: str, config_key: str) -> Any:
    """Returns the value of a column, or of a part of a nested column named "outer.inner"."""
    if key in row:
        return row[key]
    value: Any = row
    for depth, part in enumerate(key.split(".")):
        if depth and value is None:
            raise UserError(
                f"{source}: column '{key.rpartition('.')[0]}' is null, so the row has no '{key}' ({config_key}). "
                "Remove the row or fill it in."
            )
        if not isinstance(value, dict) or part not in value:
            hint = did_you_mean(key, row) or _prompt_hint(key, row, config_key)
            if not hint and config_key == "data.answer_key":
                hint = " If the data has no answers, set it to ''."
            raise UserError(f"{source}: no column '{key}' ({config_key}). Columns: {', '.join(row)}.{hint}")
        value = value[part]
    return value
