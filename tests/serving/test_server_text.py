"""The server's text: tokenizers of folders, chat templates in a sandbox, stop strings, and bytes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from jax_sparse_mla.server.protocol import ApiError, Served, parse
from jax_sparse_mla.server.text import Bytes, Stops, Tokenizer, text_of
from jax_sparse_mla.serving.adjust import Adjust

TEXT = "The quick brown fox — naïve, 世界, 👩‍🚀 jumps over the lazy dog. " * 3
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
CONFIG = {
    "add_bos_token": True,
    "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a byte-level tokenizer, whose tokens split many characters."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("checkpoint")
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return path


def decoded(text, tokens):
    decoder = text.decoder()
    return "".join(map(decoder.feed, tokens)) + decoder.end()


def test_a_folder_is_read(folder):
    text = Tokenizer(folder)
    tokens = text.encode(TEXT)
    assert tokens[0] == 0 and text.encode(TEXT, special=False) == tokens[1:] and max(tokens) < 300
    assert decoded(text, tokens) == TEXT  # without special tokens


@pytest.mark.long
def test_a_folder_is_read_as_by_transformers(folder):
    text = Tokenizer(folder)
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = text.encode(TEXT)
    assert list(other(TEXT).input_ids) == tokens and other.decode(tokens, skip_special_tokens=True) == TEXT
    messages = [{"role": "user", "content": "a <b> 世"}]
    assert other.apply_chat_template(messages, tokenize=False) == text.template.render(messages=messages)


def test_characters_of_several_tokens_come_whole(folder):
    text = Tokenizer(folder)
    for tokens in (text.encode("世界👩‍🚀", special=False), text.encode("naïve 😀", special=False)):
        decoder = text.decoder()
        pieces = list(map(decoder.feed, tokens))
        assert "�" not in "".join(pieces) and "" in pieces and decoder.end() == ""
        cut = decoded(text, tokens[:-1])  # the last character lacks a byte
        assert cut.endswith("�") and cut == text._tokenizer.decode(tokens[:-1])


def test_tokens_have_their_bytes(folder):
    """Also those that are a part of a character, which the library alone gives as the replacement character."""
    text = Tokenizer(folder)
    tokens = text.encode(TEXT + "ß\x00\xa0\xad", special=False)
    assert b"".join(map(text.piece, tokens)).decode() == TEXT + "ß\x00\xa0\xad"
    assert text.piece(0) == b"<s>"


def test_what_is_no_text_does_not_wait_for_ever(folder):
    """Nor is it read again with each token: a request for it would take all of the event loop's time."""
    text = Tokenizer(folder)
    (broken,) = {token for token in range(300) if text.piece(token) == b"\x81"}
    pieces = list(map((decoder := text.decoder()).feed, [broken] * 100))
    assert len("".join(pieces)) > 80 and len("".join(pieces) + decoder.end()) == 100
    assert decoded(text, [broken] * 50 + text.encode(TEXT)) == "�" * 50 + TEXT


@given(st.lists(st.integers(0, 300), max_size=40))
def test_bytes_that_come_one_by_one_are_those_of_all(tokens):
    text = Bytes()
    assert decoded(text, tokens) == text.decode(tokens)


@settings(max_examples=300)
@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_as_if_all_was_looked_at_anew(pieces, stops):
    finder, sent, stopped = Stops(stops), "", False
    for piece in pieces:
        if not stopped:
            text, stopped = finder.feed(piece)
            sent += text
    sent += "" if stopped else finder.end()
    expected = "".join(pieces)
    for count in range(len(pieces) + 1):
        whole = "".join(pieces[:count])
        if found := [whole.index(stop) for stop in stops if stop in whole]:
            expected = whole[: min(found)]
            break
    assert sent == expected and stopped == any(stop in "".join(pieces) for stop in stops)


def test_what_waits_for_a_stop_string_is_no_more_than_it_must_be():
    finder = Stops(["abc"])
    assert [finder.feed(piece) for piece in ("xa", "b", "d", "ab")] == [
        ("x", False),
        ("", False),
        ("abd", False),
        ("", False),
    ]
    assert finder.feed("cz") == ("", True)


def chat(folder, template=None, content="hello"):
    served = Served("m", text_of(str(folder), 300, template), Adjust(), (1,), 1000, 300)
    body = {"messages": [{"role": "user", "content": content}]}
    return served.text, parse(json.dumps(body).encode(), True, served).request.prompt


def test_a_chat_has_its_special_tokens_once(folder):
    text, prompt = chat(folder)
    assert prompt == text.encode("<s><user>hello<assistant>", special=False) and prompt.count(0) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_is_kept_in_a_sandbox(folder, template, message):
    with pytest.raises(ApiError, match=message) as refused:
        chat(folder, template)
    assert refused.value.status == 400 and refused.value.param == "messages"


def test_templates_of_a_folder(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert text_of(str(tmp_path), 300).template is None
    with pytest.raises(ApiError, match="has no chat template"):
        chat(tmp_path)
    of_list = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": of_list}))
    assert text_of(str(tmp_path), 300).template.render() == "named"
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert text_of(str(tmp_path), 300).template.render() == "of its own file"
    assert text_of(str(tmp_path), 300, "given").template.render() == "given"
    with pytest.raises(ValueError, match="the chat template is none"):
        text_of(str(tmp_path), 300, "{% for %}")


def test_broken_folders_are_named(tmp_path):
    assert isinstance(text_of(str(tmp_path), 256), Bytes) and isinstance(text_of(None, 64), Bytes)
    with pytest.raises(ValueError, match="a vocabulary too small for bytes: 200"):
        text_of(str(tmp_path), 200)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has tokenizer\.model and no tokenizer\.json"):
        text_of(str(tmp_path), 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        text_of(str(tmp_path), 300)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="leads out of the folder"):
        text_of(str(tmp_path), 300)
