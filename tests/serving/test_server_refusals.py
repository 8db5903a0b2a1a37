"""What the server does not serve: it is refused by name, with status 400."""

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
from served import Running, new_engine


@pytest.fixture(scope="module")
def server():
    with Running(new_engine()) as running:
        yield running


BAD = [
    ({"n": 2}, "n", "n is not served"),
    ({"best_of": 3}, "best_of", "best_of is not served"),
    ({"echo": True}, "echo", "echo is not served"),
    ({"suffix": "x"}, "suffix", "suffix is not served"),
    ({"tools": [{}]}, "tools", "tools is not served"),
    ({"unheard_of": 1}, "unheard_of", "unheard_of is not served"),
    ({"temperature": -1}, "temperature", "temperature must be"),
    ({"temperature": "hot"}, "temperature", "temperature must be a number"),
    ({"top_p": 0}, "top_p", "top_p must be"),
    ({"top_p": True}, "top_p", "top_p must be a number"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer"),
    ({"max_tokens": 2000}, "prompt", "at most 2000 together"),
    ({"logprobs": 21}, "logprobs", "logprobs must be from 0 to 20"),
    ({"seed": "x"}, "seed", "seed must be an integer"),
    ({"stop": ""}, "stop", "stop must be"),
    ({"stop": [1]}, "stop", "stop must be"),
    ({"stop": ["x"] * 17}, "stop", "stop must be"),
    ({"stop": "x" * 257}, "stop", "stop must be"),
    ({"stream": "yes"}, "stream", "stream must be true or false"),
    ({"stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias must have"),
    ({"logit_bias": {"64": 1}}, "logit_bias", "out of the model's vocabulary"),
    ({"logit_bias": {"1": 200}}, "logit_bias", "values from -100 to 100"),
    ({"logit_bias": {str(i): 1 for i in range(5)}}, "logit_bias", "at most 4 tokens"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be"),
    ({"top_k": 1 << 30}, "top_k", "top_k must be"),
    ({"min_p": 2}, "min_p", "min_p must be"),
    ({"temperature": 10**400}, "temperature", "temperature must be finite"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "logit_bias must have tokens"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "values from -100 to 100"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options", "include_usage must be true or false"),
    ({"stream_options": {"\ud800": 1}}, "stream_options", "stream_options.\ud800 is not served"),
    ({"\ud800": 1}, "\ud800", "is not served"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": ["a", "b"]}, "prompt", "prompt must be one text"),
    ({"prompt": [[1], [2]]}, "prompt", "prompt must be one text"),
    ({"prompt": {"a": 1}}, "prompt", "prompt must be a text"),
    ({"prompt": [1, -5]}, "prompt", "out of the model's vocabulary"),
    ({"prompt": "letters"}, "prompt", "out of the model's vocabulary"),
    ({"prompt": "\ud800"}, "prompt", "no text that the tokenizer takes"),
    ({"prompt": "1" * 3000}, "prompt", "at most 2000 together"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{case[1]!a}" for i, case in enumerate(BAD)])
def test_what_is_not_served_is_refused_by_name(server, fields, param, message):
    status, body = server.ask("POST", "/v1/completions", {"model": "summing", "prompt": "1", "max_tokens": 2} | fields)
    error = json.loads(body)["error"]
    assert status == 400 and error["param"] == param and message in error["message"], error
    assert error["type"] == "invalid_request_error"


CHATS = [
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "the content of a message must be"),
    ({"messages": [{"content": "1"}]}, "a message must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text are not served"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "no text are not served"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "a text or a list of texts"),
    ({"messages": [{"role": "user", "content": "1", "\ud800": 1}]}, "messages with \ud800 are not served"),
    ({"messages": [{"role": "assistant", "content": "1", "tool_calls": [{}]}]}, "tool_calls are not served"),
    ({"top_logprobs": 1}, "top_logprobs needs logprobs"),
    ({"prompt": "1"}, "prompt is not served"),
    ({"response_format": {"type": "json_object"}}, "response_format is not served"),
]


@pytest.mark.parametrize(("fields", "message"), CHATS, ids=range(len(CHATS)))
def test_chats_that_are_refused(server, fields, message):
    body = {"model": "summing", "messages": [{"role": "user", "content": "1"}]} | fields
    status, body = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and message in json.loads(body)["error"]["message"]


def test_no_depth_of_a_body_is_a_fault_of_the_server(server):
    for depth in range(975, 1000):  # the parser's limit is within
        body = b'{"prompt": "1", "seed": %s%s}' % (b"[" * depth, b"]" * depth)
        assert server.ask("POST", "/v1/completions", body)[0] == 400
