"""Text to token ids and back: a Hugging Face tokenizer from a local folder, or a character tokenizer.

Owns `Tokenizer`, which end-of-sequence ids a model has, and the tokenizer files of an export. It never runs code from a
model folder and never looks outside the given folders.
"""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.config.config import DataConfig, ModelConfig
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.paths import CHAR_PREFIX
from mrl.data.chat_text import TRUSTED_ROLES, ChatText, Quotes
from mrl.errors import UserError, first_line
from mrl.models.hf_config import TOKENIZER_FILES, read_json

_MOST_IDS = 1 << 31
_DECODING = ("decode", "_decode")


class Tokenizer(ABC):
    """What mrl asks of a tokenizer.

    Attributes:
        name: Folder or spec it came from, for messages.
        bos_id: Beginning-of-sequence token that starts a prompt; None: prompts start without one.
        eos_ids: Tokens that end a response; the first one ends a supervised response.
        special_ids: Tokens that are no text, the end tokens among them.
        pad_id: A token that may stand where nothing is read.
        vocab_size: One more than the largest id that `encode` can give.
        has_chat_template: Whether `apply_chat_template` works.
    """

    name: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    pad_id: int
    vocab_size: int
    has_chat_template: bool

    @abstractmethod
    def encode(self, text: str | ChatText, *, prompt: bool = False) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Special tokens that are written out in it become their ids, except where it only quotes them.
            prompt: Start with the beginning-of-sequence token where the tokenizer puts one before a text, once: a text
                that begins with it (a chat template may have written it) gets no second one.

        Raises:
            UserError: The text holds what the tokenizer cannot encode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of the text that a token stands for; a part of a character has bytes that are no UTF-8."""
        return self.decode([token]).encode("utf-8", "replace")

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text."""

    def quoted(self, text: str) -> ChatText:
        """Returns a text from outside, such as an environment's, whose special tokens are only quoted."""
        return ChatText(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Returns the token ids of a conversation, up to where the assistant begins to answer.

        Args:
            messages: At least one.
            tools: Schemas of what the assistant may call.

        Raises:
            UserError: There is no chat template, or it refuses the messages.
        """
        return self.encode(self.render_chat(messages, begins_answer=True, tools=tools))

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begins_answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Returns the text that the chat template makes of a conversation; `apply_chat_template` encodes it.

        Args:
            messages: At least one.
            begins_answer: End where the assistant begins to answer.
            tools: Schemas of what the assistant may call.
            trusted: Roles whose messages may hold special tokens; in other messages they are only quoted.

        Raises:
            UserError: There is no chat template, or it refuses the messages.
        """

    @abstractmethod
    def encode_with_places(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text, and the characters [first, end) of it that each stands for.

        Raises:
            UserError: The text holds what the tokenizer cannot encode, or it cannot tell the places.
        """

    @abstractmethod
    def _write_files(self, folder: Path) -> None:
        """Writes the files from which transformers' AutoTokenizer loads a tokenizer with the same ids."""

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer, and its end tokens where transformers' `generate` and engines look for them.

        Args:
            folder: Made where it is not there; in its generation_config.json, and config.json if there is one, the end
                tokens become `eos_ids`.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._write_files(target)
        for name in ("generation_config.json", "config.json"):
            file = target / name
            if name == "config.json" and not file.is_file():
                continue
            settings: dict[str, Any] = read_json(file) if file.is_file() else {"pad_token_id": self.pad_id}
            if not file.is_file() or set(_end_ids_in(file)) != set(self.eos_ids):
                settings["eos_token_id"] = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
                file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class CharTokenizer(Tokenizer):
    """One token per character; the last character of the spec ends a sequence."""

    def __init__(self, characters: str) -> None:
        """Args: characters: Each once, at least two; the id of a character is its position."""
        if len(characters) < 2:
            raise UserError(
                f"model.tokenizer: '{CHAR_PREFIX}{characters}' has {len(characters)} characters, expected two or more: "
                "the last one ends a sequence."
            )
        twice = sorted({character for character in characters if characters.count(character) > 1})
        if twice:
            raise UserError(
                f"model.tokenizer: '{CHAR_PREFIX}{characters}' has {twice[0]!r} twice; write each character once."
            )
        self.name = f"{CHAR_PREFIX}{characters}"
        self.bos_id = None
        self.vocab_size = len(characters)
        self.eos_ids = (len(characters) - 1,)
        self.special_ids = frozenset(self.eos_ids)
        self.pad_id = len(characters) - 1
        self.has_chat_template = False
        self._characters = characters
        self._ids = {character: index for index, character in enumerate(characters)}

    def encode(self, text: str | ChatText, *, prompt: bool = False) -> list[int]:
        """See `Tokenizer.encode`; a prompt starts with nothing special."""
        text = text.text if isinstance(text, ChatText) else text
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise UserError(
                f"the character tokenizer '{self.name}' does not know {character!r} "
                f"(position {text.index(character)} of {text[:60]!r}). Add it to model.tokenizer or clean the data."
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`; an id without a character becomes U+FFFD."""
        return "".join(self._characters[index] if 0 <= index < self.vocab_size else "\ufffd" for index in ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """See `Tokenizer.vocabulary`."""
        return dict(self._ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begins_answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Always refused."""
        raise UserError(
            f"the character tokenizer '{self.name}' has no chat template. Use prompts that are strings, with "
            "data.apply_chat_template=auto or never, or a Hugging Face tokenizer."
        )

    def encode_with_places(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """See `Tokenizer.encode_with_places`."""
        ids = self.encode(text)
        return ids, [(place, place + 1) for place in range(len(ids))]

    def _write_files(self, folder: Path) -> None:
        """See `Tokenizer`: a word-level model over single characters, which refuses unknown ones as this does."""
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastTokenizer

        end = self._characters[-1]
        fast = FastTokenizer(models.WordLevel(self._ids))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens([end])
        fast.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "unk_token": end,  # the class that transformers prefers for qwen2 would add one beyond the model's ids
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class HFTokenizer(Tokenizer):
    """A tokenizer from a local Hugging Face folder."""

    def __init__(
        self,
        folder: Path,
        *,
        model_folder: Path | None = None,
        chat_template: str | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        """Loads the tokenizer.

        Args:
            folder: Holds tokenizer.json, or what a slow tokenizer needs.
            model_folder: Its config.json and generation_config.json name end tokens too.
            chat_template: Jinja text that replaces the tokenizer's own.
            split_special_tokens: As in `DataConfig`.

        Raises:
            UserError: The folder holds no tokenizer that loads without its own code, or no end token is named.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:  # transformers raises many kinds for one thing, an unusable folder
            raise UserError(
                f"model.tokenizer: no tokenizer could be loaded from '{folder}': {first_line(error)}. "
                "Expected tokenizer.json and tokenizer_config.json of a tokenizer that needs no code of its own."
            ) from error
        self._quick = _quick(self._tokenizer)
        self.name = str(folder)
        self._folder = folder
        self._chat_template = chat_template
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self.has_chat_template = self._tokenizer.chat_template is not None
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self.eos_ids = self._end_ids(folder if model_folder is None else model_folder)
        added = self._tokenizer.added_tokens_decoder
        named = {int(index) for index, token in added.items() if token.special}
        self.special_ids = frozenset({*named, *self._tokenizer.all_special_ids, *self.eos_ids})
        texts = {token.content for token in added.values() if token.special} | set(self._tokenizer.all_special_tokens)
        by_length = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text)
        self._special = re.compile(by_length) if split_special_tokens and by_length else None
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad_id is None else int(pad_id)
        bos_id = self._tokenizer.bos_token_id
        starts_with_bos = bos_id is not None and self._tokenizer("", add_special_tokens=True)["input_ids"][:1] == [
            bos_id
        ]
        self.bos_id = int(bos_id) if starts_with_bos else None

    def _end_ids(self, model_folder: Path) -> tuple[int, ...]:
        """End tokens by the tokenizer, generation_config.json and config.json, in this order, each once."""
        named: list[int] = []
        if self._tokenizer.eos_token_id is not None:
            named.append(int(self._tokenizer.eos_token_id))
        for folder in dict.fromkeys((self._folder, model_folder)):
            for file in ("generation_config.json", "config.json"):
                named += _end_ids_in(folder / file) if (folder / file).is_file() else []
        if not named:
            raise UserError(
                f"model.tokenizer: neither the tokenizer in '{self._folder}' nor generation_config.json nor "
                "config.json names an end token (eos_token, eos_token_id), so no response could end. Add one."
            )
        return tuple(dict.fromkeys(named))

    def encode(self, text: str | ChatText, *, prompt: bool = False) -> list[int]:
        """See `Tokenizer.encode`."""
        given = text if isinstance(text, ChatText) else ChatText(text)
        if given.quoted and self._tokenizer.is_fast:
            ids = self.encode_with_places(given)[0]
        elif given.quoted:
            ids = [token for part in _parts(given) for token in self._ids(*part)]
        else:
            ids = self._ids(given.text)
        lacks_bos = prompt and self.bos_id is not None and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if lacks_bos and self.bos_id is not None else ids

    def quoted(self, text: str) -> ChatText:
        """See `Tokenizer.quoted`."""
        return ChatText(text, tuple(match.span() for match in self._special.finditer(text)) if self._special else ())

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._encoded(text, split_special_tokens=split_special_tokens)["input_ids"]
        return ids

    def _encoded(self, text: str, **options: Any) -> Any:
        """Returns what the tokenizer makes of a text.

        Raises:
            UserError: The tokenizer cannot encode it.
        """
        try:
            return self._tokenizer(text, add_special_tokens=False, **options)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"the tokenizer '{self.name}' cannot encode {text[:60]!r}: {first_line(error)}.") from error

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        if self._quick is not None:
            return str(self._quick.decode(list(ids), skip_special_tokens=False))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`; byte-level vocabularies and those with byte fallback name each byte."""
        text = self.decode([token])
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if "\ufffd" not in text:
            return text.encode("utf-8", "replace")
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
            return bytes.fromhex(byte[1])
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: number for number, character in bytes_to_unicode().items()}
        return bytes(map(byte_of.__getitem__, name)) if set(name) <= byte_of.keys() else text.encode()

    @property
    def vocabulary(self) -> dict[str, int]:
        """See `Tokenizer.vocabulary`."""
        return dict(self._tokenizer.get_vocab())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begins_answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """See `Tokenizer.render_chat`."""
        if not self.has_chat_template:
            raise UserError(
                f"the tokenizer '{self.name}' has no chat template. Give one with data.chat_template=FILE, or use "
                "prompts that are strings with data.apply_chat_template=auto or never."
            )
        quotes = Quotes(messages, self._special, trusted, tools)
        try:
            text: str = self._tokenizer.apply_chat_template(
                quotes.messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=begins_answer,
            )
        except Exception as error:  # a template is a program of the user's, and may raise anything
            raise UserError(f"the chat template of '{self.name}' failed: {first_line(error)}.") from error
        return quotes.restored(text)

    def encode_with_places(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """See `Tokenizer.encode_with_places`."""
        if not self._tokenizer.is_fast:
            raise UserError(
                f"the tokenizer '{self.name}' has no tokenizer.json and cannot tell which characters a token stands "
                "for, which conversations need. Save it as a fast tokenizer."
            )
        given = text if isinstance(text, ChatText) else ChatText(text)
        found = self._encoded(given.text, return_offsets_mapping=True)
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        quoted = iter(given.quoted)
        span = next(quoted, None)
        for token, (first, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            while span is not None and span[1] <= first:
                span = next(quoted, None)
            if span is None or end <= span[0] or token not in self.special_ids:
                ids.append(token)
                places.append((int(first), int(end)))
                continue
            spelled = self._encoded(given.text[first:end], return_offsets_mapping=True, split_special_tokens=True)
            ids += spelled["input_ids"]
            places += [(int(first + a), int(first + b)) for a, b in spelled["offset_mapping"]]
        return ids, places

    def _write_files(self, folder: Path) -> None:
        """See `Tokenizer`: the files as they are, and the chat template in use."""
        for name in TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)
        if self._chat_template is not None:
            (folder / "chat_template.jinja").write_text(self._chat_template, encoding="utf-8")


def _parts(text: ChatText) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a text in order, each with whether its special tokens are only quoted."""
    done = 0
    for first, end in text.quoted:
        yield text.text[done:first], False
        yield text.text[first:end], True
        done = end
    yield text.text[done:], False


def _quick(tokenizer: Any) -> Any | None:
    """The object behind a fast tokenizer whose class adds nothing to how it decodes; checks of ids take most time."""
    from transformers import PreTrainedTokenizerFast

    own = any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in _DECODING)
    return tokenizer.backend_tokenizer if tokenizer.is_fast and not own else None


def _end_ids_in(file: Path) -> list[int]:
    """What config.json or generation_config.json names as `eos_token_id`: a token, several, or none."""
    value = read_json(file).get("eos_token_id")
    found = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not all(type(item) is int and 0 <= item < _MOST_IDS for item in found):
        raise UserError(f"'{file}': eos_token_id is {str(value)[:100]}; expected the id of a token, several, or null.")
    return found


def load_tokenizer(model: ModelConfig, data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that the config names.

    Args:
        model: `tokenizer` is a folder or "char:<characters>"; null means `path`.
        data: `chat_template` and `apply_chat_template`.
        vocab_size: The model's vocabulary; None skips the check against it.

    Raises:
        UserError: Nothing is named, a folder or file is missing, a chat template is needed and missing, or the
            tokenizer has ids that the model has no embedding for.
    """
    tokenizer = _char(model.tokenizer, data) if _is_char(model.tokenizer) else _hugging_face(model, data)
    if data.apply_chat_template == "always" and not tokenizer.has_chat_template:
        raise UserError(
            f"data.apply_chat_template=always, but the tokenizer '{tokenizer.name}' has no chat template. Give one "
            "with data.chat_template=FILE, or set data.apply_chat_template=never."
        )
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer '{tokenizer.name}' has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary "
            f"has {vocab_size} tokens. Give the model's own tokenizer (model.tokenizer), or, with a preset, set "
            f"model.overrides.vocab_size={tokenizer.vocab_size}."
        )
    return tokenizer


def _is_char(spec: str | None) -> bool:
    return spec is not None and spec.startswith(CHAR_PREFIX)


def _char(spec: str | None, data: DataConfig) -> CharTokenizer:
    if data.chat_template is not None:
        raise UserError(
            f"data.chat_template={data.chat_template!r} cannot be used with the character tokenizer '{spec}': its "
            "special tokens would be spelled out in characters. Set data.chat_template=null."
        )
    return CharTokenizer((spec or "").removeprefix(CHAR_PREFIX))


def _hugging_face(model: ModelConfig, data: DataConfig) -> HFTokenizer:
    spec = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if spec is None:
        raise UserError(
            "model.tokenizer is null and so is model.path: there is no tokenizer. Set model.tokenizer to a folder with "
            f"a Hugging Face tokenizer or to '{CHAR_PREFIX}<characters>'."
        )
    folder = Path(spec)
    if not folder.is_dir():
        raise UserError(
            f"{key}: '{spec}' is not a folder, nor a name as on the hub.{did_you_mean_path(spec)} Give a local folder."
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(
            f"{key}: '{spec}' holds no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model). "
            "Copy the model's tokenizer files there, or set model.tokenizer to the folder that has them."
        )
    template = None
    if data.chat_template is not None:
        try:
            template = Path(data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.chat_template: '{data.chat_template}' cannot be read: {error}. Expected a text file with a "
                "Jinja template."
            ) from error
    return HFTokenizer(
        folder,
        model_folder=Path(model.path) if model.path else None,
        chat_template=template,
        split_special_tokens=data.split_special_tokens,
    )
