"""Tokenizers: a Hugging Face tokenizer from a local folder, or one token per character or byte.

Also decides which end-of-sequence ids a model has, and writes the tokenizer files of an export. Loading never runs code
from a model folder and never reads outside the given folders.
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
from mrl.config.json_file import read_json
from mrl.config.paths import BYTES, CHAR_PREFIX
from mrl.data.chat_text import TRUSTED_ROLES, ChatText, SpecialTokenEscaper
from mrl.errors import UserError, first_line
from mrl.models.hf_config import TOKENIZER_FILES

_MOST_IDS = 1 << 31
_DECODING = ("decode", "_decode")
_SHOWN_BYTES = frozenset({*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)})
"""Bytes that byte-level tokenizers of Hugging Face write as the character with this number."""
_END = "<|end|>"
_BYTES_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}" + _END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of `ByteTokenizer`."""


class Tokenizer(ABC):
    """Tokenizer interface of the package.

    Attributes:
        name: Folder or spec that it was loaded from, for messages.
        bos_id: Beginning-of-sequence token that starts a prompt; None where prompts start without one.
        eos_ids: Tokens that end a response; supervised responses end with the first one.
        special_ids: Ids of special tokens, including the end tokens.
        pad_id: Token id for padding positions, which are never read.
        vocab_size: Largest id that `encode` can return, plus 1.
        has_chat_template: True if `apply_chat_template` works.
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
            text: Special tokens written out in it become their ids, except inside `ChatText.quoted`
                spans.
            prompt: True to prepend the beginning-of-sequence token if this tokenizer uses one. It is not added
                twice: a text that starts with it (from a chat template) stays unchanged.

        Raises:
            UserError: The text contains characters that the tokenizer cannot encode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token's text; for a token with part of a character they are not valid UTF-8."""
        return self.decode([token]).encode("utf-8", "replace")

    @property
    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Token ids by token text."""

    def escape_special_tokens(self, text: str) -> ChatText:
        """Marks all special tokens in an untrusted text (such as an environment's) as ordinary characters."""
        return ChatText(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Returns the token ids of a conversation, ending with the generation prompt of the assistant.

        Args:
            messages: At least one chat message with "role" and "content".
            tools: JSON schemas of the functions that the assistant may call.

        Raises:
            UserError: The tokenizer has no chat template, or the template rejects the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt=True, tools=tools))

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Returns a conversation as text rendered by the chat template; `apply_chat_template` encodes this text.

        Args:
            messages: At least one chat message with "role" and "content".
            add_generation_prompt: True to append the generation prompt of the assistant.
            tools: JSON schemas of the functions that the assistant may call.
            trusted: Roles whose messages may contain special tokens; in other messages they are encoded as ordinary
                characters.

        Raises:
            UserError: The tokenizer has no chat template, or the template rejects the messages.
        """

    @abstractmethod
    def encode_with_offsets(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text, and the character span [first, end) of each token.

        Raises:
            UserError: The text cannot be encoded, or the tokenizer does not report offsets.
        """

    @abstractmethod
    def _write_files(self, folder: Path) -> None:
        """Writes files from which transformers' AutoTokenizer loads a tokenizer with the same ids."""

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer files, and the end tokens where `generate` and inference engines read them.

        Args:
            folder: Target folder, created if missing. `eos_token_id` in its generation_config.json (and in config.json
                if present) is set to `eos_ids`.
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
    """Tokenizer with one token per character; the last character of the spec is the end token."""

    def __init__(self, characters: str) -> None:
        """Creates the tokenizer.

        Args:
            characters: At least two different characters; a character's id is its position.
        """
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
        """Implements `Tokenizer.encode`; there is no beginning-of-sequence token."""
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
        """Implements `Tokenizer.decode`; an id without a character becomes U+FFFD."""
        return "".join(self._characters[index] if 0 <= index < self.vocab_size else "\ufffd" for index in ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by character."""
        return dict(self._ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Raises UserError: there is no chat template."""
        raise UserError(
            f"the character tokenizer '{self.name}' has no chat template. Use prompts that are strings, with "
            "data.apply_chat_template=auto or never, or a Hugging Face tokenizer."
        )

    def encode_with_offsets(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """Implements `Tokenizer.encode_with_offsets`."""
        ids = self.encode(text)
        return ids, [(index, index + 1) for index in range(len(ids))]

    def _write_files(self, folder: Path) -> None:
        """Writes a word-level tokenizer over single characters, which rejects unknown characters like this class."""
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer(models.WordLevel(self._ids))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        fast.decoder = decoders.Fuse()
        _write_fast_tokenizer(fast, folder, self._characters[-1])


class ByteTokenizer(Tokenizer):
    """Tokenizer with one token per byte of UTF-8, and an end token, `<|end|>`. It encodes every text."""

    def __init__(self) -> None:
        self.name = BYTES
        self.bos_id = None
        self.vocab_size = 257
        self.eos_ids = (256,)
        self.special_ids = frozenset(self.eos_ids)
        self.pad_id = 256
        self.has_chat_template = True

    def encode(self, text: str | ChatText, *, prompt: bool = False) -> list[int]:
        """Implements `Tokenizer.encode`; there is no beginning-of-sequence token."""
        return self.encode_with_offsets(text)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Implements `Tokenizer.decode`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Overrides `Tokenizer.token_bytes`."""
        return bytes([token]) if 0 <= token < 256 else _END.encode() if token in self.eos_ids else b"\xef\xbf\xbd"

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by the characters that byte-level tokenizers of Hugging Face write for bytes."""
        others = (byte for byte in range(256) if byte not in _SHOWN_BYTES)
        texts = {chr(byte): byte for byte in sorted(_SHOWN_BYTES)}
        return texts | {chr(256 + place): byte for place, byte in enumerate(others)} | {_END: self.eos_ids[0]}

    def escape_special_tokens(self, text: str) -> ChatText:
        """Implements `Tokenizer.escape_special_tokens`."""
        return ChatText(text, tuple(match.span() for match in re.finditer(re.escape(_END), text)))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Implements `Tokenizer.render_chat`: `<|role|>`, content and end token of each message; without tools."""
        text = ChatText("")
        for message in messages:
            content = str(message.get("content") or "")
            inside = ChatText(content) if message["role"] in trusted else self.escape_special_tokens(content)
            text = text.joined(ChatText(f"<|{message['role']}|>")).joined(inside).joined(ChatText(_END))
        return text.joined(ChatText("<|assistant|>")) if add_generation_prompt else text

    def encode_with_offsets(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """Implements `Tokenizer.encode_with_offsets`; all bytes of a character have its span."""
        given = text if isinstance(text, ChatText) else ChatText(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        first = 0
        for part, quoted in _literal_parts(given):
            for piece in [part] if quoted else re.split(f"({re.escape(_END)})", part):
                if piece == _END and not quoted:
                    ids.append(self.eos_ids[0])
                    offsets.append((first, first + len(piece)))
                else:
                    for place, character in enumerate(piece, first):
                        encoded = character.encode("utf-8", "replace")
                        ids += encoded
                        offsets += [(place, place + 1)] * len(encoded)
                first += len(piece)
        return ids, offsets

    def _write_files(self, folder: Path) -> None:
        """Writes a byte-level BPE tokenizer without merges."""
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import decoders, models, pre_tokenizers

        fast = FastTokenizer(models.BPE(vocab=self.vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        _write_fast_tokenizer(fast, folder, _END, chat_template=_BYTES_TEMPLATE)


def _write_fast_tokenizer(fast: Any, folder: Path, end: str, **more: str) -> None:
    """Writes a tokenizer of the library tokenizers whose token `end` also pads, with further settings."""
    fast.add_special_tokens([end])
    fast.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,  # the class that transformers prefers for qwen2 would add one beyond the model's ids
        "clean_up_tokenization_spaces": False,
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class HFTokenizer(Tokenizer):
    """Tokenizer from a local Hugging Face folder."""

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
            folder: Folder with tokenizer.json or the files of a slow tokenizer.
            model_folder: Folder whose config.json and generation_config.json may name more end tokens; None: `folder`.
            chat_template: Jinja template that reoffsets the tokenizer's own.
            split_special_tokens: `data.split_special_tokens`: whether special tokens in untrusted messages are encoded
                as characters.

        Raises:
            UserError: The folder has no tokenizer that loads without custom code, or no end token is named.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:  # transformers raises many types for an unusable folder
            raise UserError(
                f"model.tokenizer: no tokenizer could be loaded from '{folder}': {first_line(error)}. "
                "Expected tokenizer.json and tokenizer_config.json of a tokenizer that needs no code of its own."
            ) from error
        self._rust_tokenizer = _rust_tokenizer(self._tokenizer)
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
        """Returns the end tokens of the tokenizer, generation_config.json and config.json, without repeats."""
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
        """Implements `Tokenizer.encode`."""
        given = text if isinstance(text, ChatText) else ChatText(text)
        if given.quoted and self._tokenizer.is_fast:
            ids = self.encode_with_offsets(given)[0]
        elif given.quoted:
            ids = [token for part in _literal_parts(given) for token in self._ids(*part)]
        else:
            ids = self._ids(given.text)
        lacks_bos = prompt and self.bos_id is not None and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if lacks_bos and self.bos_id is not None else ids

    def escape_special_tokens(self, text: str) -> ChatText:
        """Implements `Tokenizer.escape_special_tokens`."""
        return ChatText(text, tuple(match.span() for match in self._special.finditer(text)) if self._special else ())

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._encoded(text, split_special_tokens=split_special_tokens)["input_ids"]
        return ids

    def _encoded(self, text: str, **options: Any) -> Any:
        try:
            return self._tokenizer(text, add_special_tokens=False, **options)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"the tokenizer '{self.name}' cannot encode {text[:60]!r}: {first_line(error)}.") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Implements `Tokenizer.decode`."""
        if self._rust_tokenizer is not None:
            return str(self._rust_tokenizer.decode(list(ids), skip_special_tokens=False))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Implements `Tokenizer.token_bytes` for byte-level vocabularies and those with byte fallback."""
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
        """Token ids by token text."""
        return dict(self._tokenizer.get_vocab())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        trusted: Collection[str] = TRUSTED_ROLES,
    ) -> ChatText:
        """Implements `Tokenizer.render_chat`."""
        if not self.has_chat_template:
            raise UserError(
                f"the tokenizer '{self.name}' has no chat template. Give one with data.chat_template=FILE, or use "
                "prompts that are strings with data.apply_chat_template=auto or never."
            )
        escaper = SpecialTokenEscaper(messages, self._special, trusted, tools)
        try:
            text: str = self._tokenizer.apply_chat_template(
                escaper.messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # the template is user code and may raise anything
            raise UserError(f"the chat template of '{self.name}' failed: {first_line(error)}.") from error
        return escaper.restore(text)

    def encode_with_offsets(self, text: str | ChatText) -> tuple[list[int], list[tuple[int, int]]]:
        """Implements `Tokenizer.encode_with_offsets`."""
        if not self._tokenizer.is_fast:
            raise UserError(
                f"the tokenizer '{self.name}' has no tokenizer.json and cannot report character offsets, which "
                "training on conversations needs. Save it as a fast tokenizer."
            )
        given = text if isinstance(text, ChatText) else ChatText(text)
        found = self._encoded(given.text, return_offsets_mapping=True)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        quoted = iter(given.quoted)
        span = next(quoted, None)
        for token, (first, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            while span is not None and span[1] <= first:
                span = next(quoted, None)
            if span is None or end <= span[0] or token not in self.special_ids:
                ids.append(token)
                offsets.append((int(first), int(end)))
                continue
            spelled = self._encoded(given.text[first:end], return_offsets_mapping=True, split_special_tokens=True)
            ids += spelled["input_ids"]
            offsets += [(int(first + a), int(first + b)) for a, b in spelled["offset_mapping"]]
        return ids, offsets

    def _write_files(self, folder: Path) -> None:
        """Copies the tokenizer files and writes the chat template in use."""
        for name in TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)
        if self._chat_template is not None:
            (folder / "chat_template.jinja").write_text(self._chat_template, encoding="utf-8")


def _literal_parts(text: ChatText) -> Iterator[tuple[str, bool]]:
    """Yields consecutive parts of a text, each with whether its special tokens are ordinary characters."""
    done = 0
    for first, end in text.quoted:
        yield text.text[done:first], False
        yield text.text[first:end], True
        done = end
    yield text.text[done:], False


def _rust_tokenizer(tokenizer: Any) -> Any | None:
    """Returns the Rust tokenizer if the class does not override decoding, else None; it skips slow checks of ids."""
    from transformers import PreTrainedTokenizerFast

    own = any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in _DECODING)
    return tokenizer.backend_tokenizer if tokenizer.is_fast and not own else None


def _end_ids_in(file: Path) -> list[int]:
    """Returns `eos_token_id` of config.json or generation_config.json as a list (empty, one or several ids)."""
    value = read_json(file).get("eos_token_id")
    found = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not all(type(item) is int and 0 <= item < _MOST_IDS for item in found):
        raise UserError(f"'{file}': eos_token_id is {str(value)[:100]}; expected the id of a token, several, or null.")
    return found


def load_tokenizer(model: ModelConfig, data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a config.

    Args:
        model: `tokenizer` is a folder, "char:<characters>" or "bytes:"; null means `path`.
        data: `chat_template` and `apply_chat_template`.
        vocab_size: Vocabulary size of the model to check the ids against; None skips the check.

    Raises:
        UserError: No tokenizer is named, a folder or file is missing, a required chat template is missing, or the
            tokenizer has ids outside the model's embedding.
    """
    named = model.tokenizer or ""
    own = named.startswith((CHAR_PREFIX, BYTES))
    tokenizer = _without_files(named, data) if own else _hugging_face(model, data)
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


def _without_files(spec: str, data: DataConfig) -> Tokenizer:
    """Returns a tokenizer of characters or bytes."""
    if data.chat_template is not None:
        raise UserError(
            f"data.chat_template={data.chat_template!r} cannot be used with the tokenizer '{spec}', which lacks the "
            "template's special tokens. Set data.chat_template=null."
        )
    if spec.startswith(CHAR_PREFIX):
        return CharTokenizer(spec.removeprefix(CHAR_PREFIX))
    if spec != BYTES:
        raise UserError(f"model.tokenizer: '{spec}' has text after '{BYTES}'. Write only '{BYTES}'.")
    return ByteTokenizer()


def _hugging_face(model: ModelConfig, data: DataConfig) -> HFTokenizer:
    spec = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if spec is None:
        raise UserError(
            "model.tokenizer and model.path are both null: there is no tokenizer. Set model.tokenizer to a folder with "
            f"a Hugging Face tokenizer or to '{CHAR_PREFIX}<characters>'."
        )
    folder = Path(spec)
    if not folder.is_dir():
        raise UserError(
            f"{key}: '{spec}' is not a folder, and names on the hub are not downloaded.{did_you_mean_path(spec)} Give "
            "a local folder."
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(
            f"{key}: '{spec}' contains no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model). "
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
