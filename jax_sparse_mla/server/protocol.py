"""Bodies of OpenAI's completions and chat completions: what a request asks for, and the bodies of answers."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jax_sparse_mla.server.text import Text
from jax_sparse_mla.serving.adjust import Adjust
from jax_sparse_mla.serving.request import MOST_LOGPROBS, Logprob, Request, Sampling

MOST_STOPS, LONGEST_STOP = 16, 256
NEW_TOKENS = 16  # of a completion that does not say how many, as OpenAI has it

# Fields that may be there with a value that asks for nothing. Whoever is asked for more refuses them by name.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # say nothing of the text
_BOTH = {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop", "logprobs"}
_BOTH |= {"logit_bias", "presence_penalty", "frequency_penalty", "top_k", "min_p"}
_OF = {False: _BOTH | {"prompt"}, True: _BOTH | {"messages", "max_completion_tokens", "top_logprobs"}}


class ApiError(Exception):
    """A refusal or a failure.

    Attributes:
      status: of HTTP. message: one sentence. param: the field of the body that is meant. code: for programs.
      retry_after: seconds after which a client may try again; 0: not said.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int = 0):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server serves.

    Attributes:
      name: of the model. text: its tokenizer. hook: the engine's.
      eos_token_ids: tokens that end a request.
      room: tokens that a request may have, its output included. vocab_size: of the model.
      temperature, top_p: where a body does not say them.
    """

    name: str
    text: Text
    hook: Adjust
    eos_token_ids: tuple[int, ...]
    room: int
    vocab_size: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body that was understood."""

    request: Request
    chat: bool
    stream: bool
    usage: bool  # whether a stream ends with the usage
    stops: tuple[str, ...]


class _Fields(dict[str, Any]):
    """The fields of a body that are not null; each is taken as its type, or refused by name."""

    def of(self, name: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.get(name, default)
        if name in self and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
            raise _wrong(name, f"{name} must be {what}, got {reprlib.repr(value)}")
        return value

    def flag(self, name: str) -> bool:
        return self.of(name, bool, "true or false", False)

    def integer(self, name: str, default: int | None, least: int | None = None, most: int | None = None) -> int | None:
        value = self.of(name, int, "an integer", default)
        if name in self and not ((least is None or least <= value) and (most is None or value <= most)):
            span = f"at least {least}" if most is None else f"from {least} to {most}"
            raise _wrong(name, f"{name} must be {span}, got {value}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.of(name, (int, float), "a number", default)
        if not abs(value) <= sys.float_info.max:
            raise _wrong(name, f"{name} must be finite")
        return float(value)


def _wrong(name: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=name, code=code)


def parse(raw: bytes, chat: bool, served: Served) -> Asked:
    """Understands a body; raises ApiError for one that is not served, with the field's name."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be an object, got {type(body).__name__}")
    fields = _Fields({name: value for name, value in body.items() if value is not None})
    for name, value in fields.items():
        if name not in _OF[chat] | _IGNORED and value not in _NEUTRAL.get(name, ()):
            raise _wrong(name, f"{name} is not served here: leave it out", "unsupported_parameter")
    if fields.of("model", str, "a string", served.name) != served.name:
        raise unknown_model(body["model"])
    prompt, name = (_chat_prompt(fields, served), "messages") if chat else (_prompt(fields, served), "prompt")
    if not prompt:
        raise _wrong(name, "the prompt has no tokens")
    new, left = _new_tokens(fields, chat), served.room - len(prompt)
    if (wanted := new or 1) > left:
        why = f"the prompt has {len(prompt)} tokens and {wanted} are asked for: at most {served.room} together"
        raise _wrong(name, why, "context_length_exceeded")
    of_stream = fields.of("stream_options", dict, "an object", {})
    if unknown := set(of_stream) - {"include_usage"}:
        raise _wrong("stream_options", f"stream_options.{min(unknown)} is not served here: leave it out")
    try:
        request = Request(prompt, new or left, sampling=_sampling(fields, served), eos_token_ids=served.eos_token_ids)
        request.top_logprobs, request.adjust = _logprobs(fields, chat), _adjust(fields, served)
    except ValueError as error:  # whose first word is the field's name
        raise _wrong(str(error).split()[0], str(error)) from error
    if not isinstance(usage := of_stream.get("include_usage") or False, bool):
        raise _wrong("stream_options", "stream_options.include_usage must be true or false")
    return Asked(request, chat, stream=fields.flag("stream"), usage=usage, stops=_stops(fields))


def unknown_model(name: Any) -> ApiError:
    return ApiError(404, f"the model {name!r:.80} is not served", param="model", code="model_not_found")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _prompt(fields: _Fields, served: Served) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return _encode(served, prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1:
        raise _wrong("prompt", "prompt must be one text or the tokens of one: send a request for each")
    raise _wrong("prompt", "prompt must be a text or a list of tokens")


def _chat_prompt(fields: _Fields, served: Served) -> list[int]:
    messages, template = fields.get("messages"), served.text.template
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "messages must be a list of at least one message")
    if template is None:
        raise _wrong("messages", f"{served.name} has no chat template: /v1/completions serves it")
    try:
        text = template.render(messages=[_message(m) for m in messages], add_generation_prompt=True)
    except ApiError:
        raise
    except Exception as error:  # a template is a program of the checkpoint's
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise _wrong("messages", f"the chat template refuses the messages: {kind}{error}") from error
    return _encode(served, text, "messages", special=False)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", "a message must be an object with a role and a content")
    given = {name: value for name, value in message.items() if value is not None}
    if unknown := given.keys() - {"role", "content", "name", "refusal"}:
        raise _wrong("messages", f"messages with {min(unknown)} are not served here")
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise _wrong("messages", "parts of a message that are no text are not served here")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise _wrong("messages", "the content of a message must be a text or a list of texts")
    return {**given, "content": content}


def _encode(served: Served, text: str, name: str, special: bool = True) -> list[int]:
    try:
        return served.text.encode(text, special)
    except Exception as error:  # a lone surrogate, for instance
        raise _wrong(name, f"{name} is no text that the tokenizer takes: {error}") from error


def _new_tokens(fields: _Fields, chat: bool) -> int | None:
    """How many tokens are asked for; None: as many as there is room for."""
    if "max_completion_tokens" in fields:
        return fields.integer("max_completion_tokens", None, 1)
    return fields.integer("max_tokens", None if chat else NEW_TOKENS, 1)


def _sampling(fields: _Fields, served: Served) -> Sampling:
    seed = fields.integer("seed", None)
    temperature, top_p = fields.number("temperature", served.temperature), fields.number("top_p", served.top_p)
    return Sampling(temperature, top_p, secrets.randbits(32) if seed is None else seed)


def _logprobs(fields: _Fields, chat: bool) -> int | None:
    if not chat:
        return fields.integer("logprobs", None, 0, MOST_LOGPROBS)
    count = fields.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if fields.flag("logprobs"):
        return count
    if count:
        raise _wrong("top_logprobs", "top_logprobs needs logprobs true")
    return None


def _adjust(fields: _Fields, served: Served) -> tuple[float, ...]:
    bias = fields.of("logit_bias", dict, "an object", {})
    if not all(token.isdecimal() and len(token) < 10 and type(bias[token]) in (int, float) for token in bias):
        raise _wrong("logit_bias", "logit_bias must have tokens as names and numbers as values")
    if any(int(token) >= served.vocab_size for token in bias):
        raise _wrong("logit_bias", f"logit_bias has tokens out of the model's vocabulary of {served.vocab_size}")
    return served.hook.parameters(
        top_k=max(0, fields.integer("top_k", 0, -1)),  # -1: none, as others have it
        min_p=fields.number("min_p", 0),
        presence_penalty=fields.number("presence_penalty", 0),
        frequency_penalty=fields.number("frequency_penalty", 0),
        logit_bias={int(token): value for token, value in bias.items()},
    )


def _stops(fields: _Fields) -> tuple[str, ...]:
    stops = fields.of("stop", (str, list), "a text or a list of texts", [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise _wrong("stop", f"stop must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return tuple(stops)


# Answers.


@dataclasses.dataclass
class Piece:
    """Text to send, and its tokens with their log-probabilities, where they are asked for."""

    text: str
    logprobs: list[tuple[int, Logprob]]
    finish: str | None = None


class Answer:
    """The bodies of one answer."""

    def __init__(self, asked: Asked, served: Served):
        self._asked, self._served, self._offset = asked, served, 0
        kind = "chatcmpl" if asked.chat else "cmpl"
        self._object, self._object_of_chunks = (
            ("chat.completion", "chat.completion.chunk") if asked.chat else ("text_completion",) * 2
        )
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}

    def first(self) -> dict[str, Any]:
        """What a stream of a chat begins with."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def chunk(self, piece: Piece) -> dict[str, Any]:
        content = {"delta": {"content": piece.text} if piece.text else {}} if self._asked.chat else {"text": piece.text}
        return self._chunk(content, self._logprobs(piece), piece.finish)

    def usage(self, tokens: int) -> dict[str, Any]:
        """The last chunk of a stream, where it is asked for."""
        return {**self._head, "object": self._object_of_chunks, "choices": [], "usage": self._usage(tokens)}

    def whole(self, piece: Piece, tokens: int) -> dict[str, Any]:
        """The body of an answer that is no stream."""
        content = {"text": piece.text}
        if self._asked.chat:
            content = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}
        return {**self._head, "object": self._object, "choices": [choice], "usage": self._usage(tokens)}

    def _chunk(self, content: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": self._object_of_chunks, "choices": [choice]}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._asked.request.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._asked.request.top_logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [self._of_chat(t, x) for t, x in piece.logprobs], "refusal": None}
        texts, offsets = [self._text(token) for token, _ in piece.logprobs], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [logprob.value for _, logprob in piece.logprobs],
            "top_logprobs": [{self._text(t): value for t, value in logprob.top} for _, logprob in piece.logprobs],
            "text_offset": offsets,
        }

    def _of_chat(self, token: int, logprob: Logprob) -> dict[str, Any]:
        top = [self._entry(t, value) for t, value in logprob.top]
        return {**self._entry(token, logprob.value), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        piece = self._served.text.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": max(value, -9999.0), "bytes": list(piece)}

    def _text(self, token: int) -> str:
        return self._served.text.piece(token).decode(errors="replace")
