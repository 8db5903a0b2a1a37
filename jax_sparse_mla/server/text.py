"""Text and tokens: tokenizers of checkpoints by the library `tokenizers`, chat templates by jinja2, stop strings."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import ByteLevel, DecodeStream

from jax_sparse_mla.serving.files import path_in, read_json
from jax_sparse_mla.serving.presets import TOKENIZER_FILES, ByteTokenizer

LONGEST_TEMPLATE = 1_000_000  # bytes
MOST_WAITING = 16  # tokens that make no whole character; one of UTF-8 has at most four
# For a model without a tokenizer: roles and their words, line by line.
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Bytes(ByteTokenizer):
    """The text of a model without a tokenizer: bytes. What is not UTF-8 becomes the replacement character."""

    def __init__(self, template: str | None = None):
        self.template = compiled(template or PLAIN_TEMPLATE, {})

    def encode(self, text: str, special: bool = True) -> list[int]:
        return super().encode(text)

    def decoder(self) -> _ByteDecoder:
        return _ByteDecoder()

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""
        return bytes([token]) if 0 <= token < 256 else self.decode([token]).encode()


class _ByteDecoder:
    """The text of tokens that come one by one: what `feed` gives, and at the end what `end` does."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(bytes([token if 0 <= token < 256 else 0xFF]))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """The text of a checkpoint folder: `tokenizer.json`, and `tokenizer_config.json` where there is one.

    Args:
      template: a chat template that goes before those of the folder, `chat_template.jinja` and `tokenizer_config.json`.

    Raises:
      ValueError: a file is broken, or leads out of the folder.
    """

    def __init__(self, folder: Path, template: str | None = None):
        path = path_in(folder, "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other
            raise ValueError(f"{path}: {error}") from error
        settings = read_json(folder, "tokenizer_config.json") if _has(folder, "tokenizer_config.json") else {}
        names = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        if template is None and _has(folder, "chat_template.jinja"):
            template = path_in(folder, "chat_template.jinja").read_bytes()[:LONGEST_TEMPLATE].decode()
        if template is None and isinstance(template := settings.get("chat_template"), list):
            template = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}.get("default")
        self.template = (
            None if not isinstance(template, str) else compiled(template, {k: v for k, v in names.items() if v})
        )
        self._byte_of = _byte_of() if isinstance(self._tokenizer.decoder, ByteLevel) else {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        # As transformers 5 has it: tokenizer.json says which are added, not add_bos_token of tokenizer_config.json.
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decoder(self) -> _StreamDecoder:
        return _StreamDecoder(self._tokenizer)

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character where they are those of a byte-level tokenizer."""
        of_chars = [self._byte_of.get(char) for char in self._tokenizer.id_to_token(token) or ""]
        if of_chars and None not in of_chars:
            return bytes(of_chars)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


class _StreamDecoder:
    """As `_ByteDecoder`, by a tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []  # tokens that make no whole character yet

    def feed(self, token: int) -> str:
        text = self._stream.step(self._tokenizer, token)
        self._waiting = [] if text is not None else [*self._waiting, token]
        if len(self._waiting) == MOST_WAITING:  # no UTF-8; the library would read all of it again with each token
            text, self._waiting, self._stream = self.end(), [], DecodeStream(skip_special_tokens=True)
        return text or ""

    def end(self) -> str:
        return self._tokenizer.decode(self._waiting) if self._waiting else ""


Text = Bytes | Tokenizer


def text_of(folder: str | None, vocab_size: int, template: str | None = None) -> Text:
    """The text of a checkpoint folder, or of a preset; bytes where there is no tokenizer.

    Raises:
      ValueError: a tokenizer of another kind than `tokenizer.json`, or a vocabulary too small for bytes.
    """
    if folder is not None and (names := [name for name in TOKENIZER_FILES if _has(Path(folder), name)]):
        if "tokenizer.json" not in names:
            raise ValueError(f"{folder} has {names[0]} and no tokenizer.json, which the server reads")
        return Tokenizer(Path(folder), template)
    if vocab_size < ByteTokenizer.vocab_size and folder is not None:
        raise ValueError(f"{folder} has no tokenizer, and a vocabulary too small for bytes: {vocab_size}")
    return Bytes(template)


def compiled(template: str, variables: Mapping[str, str]) -> jinja2.Template:
    """A chat template, in jinja2's sandbox with what templates of checkpoints use.

    Raises:
      ValueError: it is none.
    """

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(variables, raise_exception=refuse)
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is none: {error}") from error


class Stops:
    """Looks for stop strings in text that comes in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is sure to stand before any stop string, and whether one has come."""
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            return held[: min(found)], True
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        kept = next((n for n in range(min(longest, len(held)), 0, -1) if self._begins(held[-n:])), 0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept], False

    def end(self) -> str:
        """What is held back, when no more comes."""
        return self._held

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable ones of Latin-1 for their own, those
    behind Latin-1 for the others, in order."""
    chars = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = {char: ord(char) for char in chars if ord(char) < 256}
    others = (byte for byte in range(256) if byte not in own.values())
    return own | dict(zip(chars[len(own) :], others))


def _has(folder: Path, name: str) -> bool:
    return os.path.lexists(folder / name)


def _content(token: Any) -> str:
    """A token of `tokenizer_config.json`, where it is a string or an object; empty where there is none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
