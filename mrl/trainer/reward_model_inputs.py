"""What a reward model reads of a sample: the actor's tokens, or the text anew by its own tokenizer and template."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import Config, DataConfig, ModelConfig
from mrl.data.chat_text import TRUSTED_ROLES, ChatText
from mrl.data.tokenizer import Tokenizer, load_tokenizer
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.hf_config import read_config
from mrl.types import Prompt, Rollout


@dataclass(frozen=True)
class Reader:
    """Of one reward model.

    Attributes:
        actors: The actor's tokenizer.
        own: The reward model's, where it reads the text anew.
        pad_id: Not read at the end of a sample, as transformers' sequence classifiers skip it; None: none is known.
        longest: Tokens that the reward model has positions for.
    """

    actors: Tokenizer
    own: Tokenizer | None
    pad_id: int | None
    longest: int

    def read(self, rollout: Rollout) -> list[int]:
        """Its token ids, the prompt's and the response's.

        Raises:
            UserError: The text cannot be rendered or encoded, or has more tokens than the model has positions for.
        """
        if self.own is None:
            ids = [*rollout.prompt.prompt_ids, *rollout.response_ids]
        else:
            kept = [token for token in rollout.response_ids if token not in self.actors.special_ids]
            ids = self.render(rollout.prompt, self.actors.decode(kept))
        if len(ids) > self.longest:
            raise UserError(
                f"prompt and response are {len(ids)} tokens of the reward model, more than its {self.longest} positions"
            )
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_id:
            end -= 1
        return ids[:end]

    def render(self, prompt: Prompt, response: str) -> list[int]:
        """A conversation by the reward model's chat template, or the texts one after the other.

        Raises:
            UserError: The text cannot be rendered or encoded.
        """
        if self.own is None:
            raise RuntimeError("the actor's tokens are read as they are")
        question = prompt.question or prompt.text
        if isinstance(question, str):
            return self.own.encode(ChatText(question).joined(self.own.quoted(response)), prompt=True)
        messages = [*question, {"role": "assistant", "content": response}]
        # The response's own special tokens were left out: one that it spells out must not become one here.
        trusted = TRUSTED_ROLES - {"assistant"}
        return self.own.encode(self.own.render_chat(messages, begins_answer=False, trusted=trusted))


def reader_of(config: Config, actors: Tokenizer, arch: ArchSpec) -> Reader:
    """What the reward model of a config reads.

    Args:
        config: With `reward.model.path`.
        actors: The actor's tokenizer.
        arch: The reward model.

    Raises:
        UserError: The reward model has no tokenizer where one is needed, or no embedding for each of its tokens.
    """
    named = config.reward.model
    where = f"reward.model.path={named.path}"
    own = None
    if named.retokenize is not False:
        try:
            data = DataConfig(split_special_tokens=config.data.split_special_tokens)
            own = load_tokenizer(ModelConfig(path=named.path), data, arch.vocab_size)
        except UserError as error:
            raise UserError(f"{where}: {error} reward.model.retokenize=false reads the actor's token ids.") from error
        if named.retokenize is None and own.vocabulary == actors.vocabulary:
            own = None
    if own is None and actors.vocab_size > arch.vocab_size:
        raise UserError(
            f"{where} has embeddings for {arch.vocab_size} tokens, the actor's tokenizer {actors.vocab_size} tokens: "
            "it cannot read the actor's token ids. Remove reward.model.retokenize, or set it to true."
        )
    pad_id = read_config(str(named.path)).get("pad_token_id")
    return Reader(actors, own, pad_id if isinstance(pad_id, int) else None, arch.max_position_embeddings)
