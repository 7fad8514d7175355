"""Input of the reward model: the actor's token ids, or the text encoded by the reward model's own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import Config, DataConfig, ModelConfig
from mrl.data.chat_text import TRUSTED_ROLES, ChatText
from mrl.data.tokenizer import Tokenizer, load_tokenizer
from mrl.errors import UserError
from mrl.models._positions import position_limit
from mrl.models.base import ArchSpec
from mrl.models.hf_config import read_config
from mrl.types import Prompt, Rollout


@dataclass(frozen=True)
class RewardModelEncoder:
    """Encoder of samples for a reward model.

    Attributes:
        actor_tokenizer: Tokenizer of the actor.
        own_tokenizer: Tokenizer of the reward model; None to use the actor's token ids.
        pad_id: Padding id, removed from the end of a sample as in transformers' sequence classifiers; None if unknown.
        longest: Maximum positions of the reward model, tokens.
    """

    actor_tokenizer: Tokenizer
    own_tokenizer: Tokenizer | None
    pad_id: int | None
    longest: int

    def encode(self, rollout: Rollout) -> list[int]:
        """Returns the token ids of prompt and response.

        Raises:
            UserError: The text cannot be rendered or encoded, or exceeds `max_position_embeddings`.
        """
        if self.own_tokenizer is None:
            ids = [*rollout.prompt.prompt_ids, *rollout.response_ids]
        else:
            kept = [token for token in rollout.response_ids if token not in self.actor_tokenizer.special_ids]
            ids = self.render(rollout.prompt, self.actor_tokenizer.decode(kept))
        if len(ids) > self.longest:
            raise UserError(
                f"prompt and response have {len(ids)} reward model tokens, more than its {self.longest} positions"
            )
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_id:
            end -= 1
        return ids[:end]

    def render(self, prompt: Prompt, response: str) -> list[int]:
        """Encodes prompt and response with the reward model's chat template; a text prompt is concatenated instead.

        Raises:
            UserError: The text cannot be rendered or encoded.
        """
        if self.own_tokenizer is None:
            raise RuntimeError("render() needs the reward model's own tokenizer; without it, use the actor's token ids")
        question = prompt.question or prompt.text
        if isinstance(question, str):
            return self.own_tokenizer.encode(
                ChatText(question).joined(self.own_tokenizer.escape_special_tokens(response)), prompt=True
            )
        messages = [*question, {"role": "assistant", "content": response}]
        # Sampled special tokens are removed already. Text of the response must not be encoded as special tokens.
        trusted = TRUSTED_ROLES - {"assistant"}
        return self.own_tokenizer.encode(
            self.own_tokenizer.render_chat(messages, add_generation_prompt=False, trusted=trusted)
        )


def build_reward_encoder(config: Config, actors: Tokenizer, arch: ArchSpec) -> RewardModelEncoder:
    """Builds the reader of the config's reward model.

    Args:
        config: Settings with `reward.model.path`.
        actors: Tokenizer of the actor.
        arch: Architecture of the reward model.

    Raises:
        UserError: The reward model lacks a tokenizer that is needed, or an embedding for some token id.
    """
    named = config.reward.model
    where = f"reward.model.path={named.path}"
    own = None
    if named.retokenize is not False:
        try:
            data = DataConfig(split_special_tokens=config.data.split_special_tokens)
            own = load_tokenizer(ModelConfig(path=named.path), data, arch.vocab_size)
        except UserError as error:
            raise UserError(
                f"{where}: {error} Or set reward.model.retokenize=false to use the actor's token ids."
            ) from error
        if named.retokenize is None and own.vocabulary == actors.vocabulary:
            own = None
    if own is None and actors.vocab_size > arch.vocab_size:
        raise UserError(
            f"{where} has embeddings for {arch.vocab_size} tokens, but the actor's tokenizer has {actors.vocab_size}. "
            "Remove reward.model.retokenize, or set it to true, so that samples are encoded for the reward model."
        )
    pad_id = read_config(str(named.path)).get("pad_token_id")
    return RewardModelEncoder(actors, own, pad_id if isinstance(pad_id, int) else None, position_limit(arch))
