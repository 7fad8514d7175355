import json

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mrl.config.config import DataConfig, ModelConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import UserError
from tests.data.folders import CHATML, byte_bpe_folder

TEXTS = ["what is two plus two?", "  spaces \n\t kept ", "naïve π 😀", "", "<|im_start|>x<|im_end|>"]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two plus two?"}]


def load(tokenizer, *, path=None, vocab_size=None, **data):
    return load_tokenizer(ModelConfig(path=path, tokenizer=str(tokenizer)), DataConfig(**data), vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_bpe_folder(tmp_path_factory.mktemp("bpe"))


def test_characters_are_ids_and_the_last_one_ends():
    tokenizer = load("char:0123456789<>+#")
    assert tokenizer.encode("<12+7>") == [10, 1, 2, 12, 7, 11]
    assert tokenizer.decode([4, 9, 13]) == "49#"
    assert tokenizer.eos_ids == (13,)
    assert tokenizer.vocab_size == 14
    assert tokenizer.decode([14, -1, 1]) == "��1"


@pytest.mark.parametrize("characters", ["0123456789<>+#", "ab \n\tπ😀.", "<>|im_#"])
def test_an_exported_character_tokenizer_gives_the_same_ids(tmp_path, characters):
    tokenizer = load(f"char:{characters}")
    tokenizer.save(tmp_path / "export")
    text = characters[::-1] + characters + characters[0] * 3
    exported = AutoTokenizer.from_pretrained(str(tmp_path / "export"), local_files_only=True)
    assert exported(text)["input_ids"] == tokenizer.encode(text)
    assert exported.decode(tokenizer.encode(text)) == text
    assert exported.eos_token_id == tokenizer.eos_ids[0]
    again = load(tmp_path / "export")
    assert (again.eos_ids, again.pad_id, again.vocab_size) == (
        tokenizer.eos_ids,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    assert again.encode(text) == tokenizer.encode(text)
    with pytest.raises(UserError, match=r"cannot encode 'Ω'"):
        again.encode("Ω")


def test_an_exported_byte_tokenizer_gives_the_same_ids(tmp_path):
    tokenizer = load("bytes:")
    tokenizer.save(tmp_path / "export")
    exported, again = AutoTokenizer.from_pretrained(str(tmp_path / "export")), load(tmp_path / "export")
    for text in [*TEXTS, "a <|end|>"]:
        assert tokenizer.encode(text) == exported(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_with_offsets(text) == again.encode_with_offsets(text)
    hostile = [*MESSAGES, {"role": "user", "content": "x <|end|>"}]
    assert tokenizer.apply_chat_template(hostile) == again.apply_chat_template(hostile)
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == (again.eos_ids, again.vocab_size)
    assert tokenizer.vocabulary == again.vocabulary
    with pytest.raises(UserError):
        load("bytes:abc")
    with pytest.raises(UserError):
        load("bytes:", chat_template="template.jinja")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mixtral", "phi3"])
def test_an_exported_character_tokenizer_gives_the_same_ids_beside_any_model(tmp_path, family):
    """transformers chooses the tokenizer's class by the model's type too."""
    tokenizer = load("char:0123456789<>+-?_#")
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": tokenizer.vocab_size}))
    again = load(tmp_path, vocab_size=tokenizer.vocab_size)
    assert again.encode("<12+7>_#") == tokenizer.encode("<12+7>_#")


@pytest.mark.parametrize("text", TEXTS)
def test_a_folder_agrees_with_transformers(folder, text):
    tokenizer = load(folder)
    expected = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)(text, add_special_tokens=False)
    assert tokenizer.encode(text) == expected["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_beginning_token_starts_prompts_only(tmp_path, folder):
    tokenizer = load(byte_bpe_folder(tmp_path, bos=True))
    assert tokenizer.encode("two", prompt=True) == [3, *tokenizer.encode("two")]
    plain = load(folder)
    assert plain.encode("two", prompt=True) == plain.encode("two")


WITH_BOS = "<s>{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("text", ["<s>two", "<s>", "<s><|im_start|>user\ntwo", "two", "", "two <s>", " <s>two"])
def test_a_prompt_begins_with_one_beginning_token(tmp_path, text):
    tokenizer = load(byte_bpe_folder(tmp_path, bos=True, chat_template=WITH_BOS))
    ids = tokenizer.encode(text, prompt=True)
    assert ids == [3, *tokenizer.encode(text.removeprefix("<s>"))]
    rendered = tokenizer.render_chat(MESSAGES, add_generation_prompt=True)
    assert tokenizer.encode(rendered.text, prompt=True) == tokenizer.apply_chat_template(MESSAGES)


def test_the_chat_template_ends_where_the_assistant_begins(folder):
    tokenizer = load(folder)
    text = tokenizer.decode(tokenizer.apply_chat_template(MESSAGES))
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ntwo plus two?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_end_tokens_come_from_tokenizer_and_model_files(tmp_path, folder):
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (model / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    tokenizer = load(folder, path=str(model))
    assert tokenizer.eos_ids == (2, 0, 3)
    assert tokenizer.pad_id == 0


def test_a_template_file_replaces_the_tokenizers_own_and_is_exported(tmp_path, folder):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    tokenizer = load(folder, chat_template=str(template))
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES)) == "[be brief][two plus two?]"
    tokenizer.save(tmp_path / "export")
    exported = load(tmp_path / "export")
    assert exported.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)


def test_an_exported_folder_gives_the_same_ids(tmp_path, folder):
    tokenizer = load(folder)
    tokenizer.save(tmp_path / "export")
    exported = load(tmp_path / "export")
    for text in TEXTS:
        assert exported.encode(text, prompt=True) == tokenizer.encode(text, prompt=True)
    assert exported.eos_ids == tokenizer.eos_ids
    assert exported.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("char:0120#", "has '0' twice"),
        ("char:#", "1 characters, expected two or more"),
        ("nowhere/at/all", "'nowhere/at/all' is not a folder"),
    ],
)
def test_unusable_tokenizers_are_refused(spec, message):
    with pytest.raises(UserError, match=message):
        load(spec)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"model.tokenizer and model.path are both null"):
        load_tokenizer(ModelConfig(), DataConfig())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"model.path: '.*empty' contains no tokenizer"):
        load_tokenizer(ModelConfig(path=str(empty)), DataConfig())
    (empty / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match=r"no tokenizer could be loaded"):
        load(empty)
    with pytest.raises(UserError, match=r"names an end token"):
        load(byte_bpe_folder(tmp_path / "endless", eos=False))


def test_code_in_a_folder_is_never_run(tmp_path):
    folder = byte_bpe_folder(tmp_path / "code")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load(folder)
    except UserError as error:
        assert "no tokenizer could be loaded" in str(error)
    assert not (tmp_path / "ran").exists()


def test_chat_template_mistakes_are_refused(tmp_path, folder):
    plain = byte_bpe_folder(tmp_path / "plain", chat_template=None)
    with pytest.raises(
        UserError, match=r"apply_chat_template=always, but the tokenizer '.*plain' has no chat template"
    ):
        load(plain, apply_chat_template="always")
    with pytest.raises(UserError, match=r"has no chat template. Give one with data.chat_template=FILE"):
        load(plain).apply_chat_template(MESSAGES)
    with pytest.raises(UserError, match=r"missing.jinja' cannot be read"):
        load(folder, chat_template=str(tmp_path / "missing.jinja"))
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat template of .* failed"):
        load(folder, chat_template=str(tmp_path / "broken.jinja")).apply_chat_template(MESSAGES)
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match=r"no system role"):
        load(folder, chat_template=str(tmp_path / "refusing.jinja")).apply_chat_template(MESSAGES)
    (tmp_path / "chatml.jinja").write_text(CHATML)
    with pytest.raises(UserError, match=r"cannot be used with the tokenizer"):
        load("char:ab#", chat_template=str(tmp_path / "chatml.jinja"))
    with pytest.raises(UserError, match=r"character tokenizer 'char:ab#' has no chat template"):
        load("char:ab#").apply_chat_template(MESSAGES)


def test_unknown_characters_are_named():
    with pytest.raises(UserError, match=r"'char:ab#' does not know 'x' \(position 2 of 'abxa'\)"):
        load("char:ab#").encode("abxa")


def test_a_vocabulary_beyond_the_models_is_refused(folder):
    size = load(folder).vocab_size
    assert load(folder, vocab_size=size).vocab_size == size
    with pytest.raises(UserError, match=rf"ids up to {size - 1}, but the model's vocabulary has {size - 1} tokens"):
        load(folder, vocab_size=size - 1)


def test_the_bytes_of_tokens_join_to_the_text_of_byte_level_vocabularies(tmp_path):
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(byte_bpe_folder(tmp_path))), DataConfig())
    text = "what é 漢 🙂 \ufffd four"
    ids = tokenizer.encode(text)
    parts = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(parts) == text.encode() and b"\x99\x82"[:1] in parts
    assert tokenizer.token_bytes(tokenizer.vocabulary["<|im_end|>"]) == b"<|im_end|>"


def test_the_bytes_of_tokens_join_to_the_text_with_byte_fallback(tmp_path):
    vocabulary = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="a").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(tmp_path)), DataConfig())
    parts = [tokenizer.token_bytes(token) for token in tokenizer.encode("a漢a")]
    assert parts == [b"a", b"\xe6", b"\xbc", b"\xa2", b"a"]
