"""The server, by the real client of OpenAI and by raw connections: answers, refusals, ends."""

import asyncio
import dataclasses
import json
import socket
import threading
import time

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
from counting_model import Smooth
from served import Running, new_engine, prompt_of, right, wait

from jax_sparse_mla.server.runner import Refused, Runner
from jax_sparse_mla.serving.request import Request

POISONED = "1?2"  # "?" has a key that is NaN


@pytest.fixture(scope="module")
def server():
    with Running(new_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def complete(client, prompt, count=8, **fields):
    fields = {"model": "summing", "prompt": prompt, "max_tokens": count} | fields
    return client.completions.create(**fields)


def streamed(stream):
    """The text of a stream of completions, its reason and usage."""
    text, finish, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert finish is None
            text, finish = text + choice.text, choice.finish_reason
    return text, finish, usage


# Answers.


def test_a_completion_has_the_text_that_generate_makes(server, client):
    prompt = prompt_of(1)
    alone = Request(list(prompt.encode()), 12)
    new_engine().run([alone])
    answer = complete(client, prompt, 12)
    assert answer.choices[0].text == bytes(alone.output).decode() == right(prompt, 12)
    assert (
        answer.choices[0].finish_reason == "length" and answer.model == "summing" and answer.object == "text_completion"
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 12, 32)
    tokens = complete(client, list(prompt.encode()), 12)
    assert tokens.choices[0].text == answer.choices[0].text
    assert len(complete(client, prompt, None).choices[0].text) == 16  # OpenAI's default


def test_a_stream_has_the_same_text(client):
    prompt = prompt_of(2)
    stream = complete(client, prompt, 30, stream=True, stream_options={"include_usage": True})
    text, finish, usage = streamed(stream)
    assert text == right(prompt, 30) and finish == "length" and usage.completion_tokens == 30
    assert streamed(complete(client, prompt, 3, stream=True))[2] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client, stream):
    messages = [
        {"role": "system", "content": "0"},
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
    ]
    from jax_sparse_mla.server import text

    with pytest.MonkeyPatch.context() as patch:  # letters are no tokens of this model
        patch.setattr(text.Bytes, "encode", lambda self, x, special=True: [ord(c) % 60 for c in x])
        fields = {"model": "summing", "messages": messages, "max_completion_tokens": 9}
        answer = client.chat.completions.create(**fields, stream=stream)
        prompt = "".join(chr(ord(c) % 60) for c in "system: 0\nuser: 12\nassistant:")
        if not stream:
            assert answer.choices[0].message.content == right(prompt, 9) and answer.object == "chat.completion"
            return
        chunks = list(answer)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right(prompt, 9)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(server, client, stream):
    prompt = prompt_of(3)
    whole = right(prompt, 60)
    stop = whole[20:23]
    answer = complete(client, prompt, 60, stop=[stop, "nowhere"], stream=stream, stream_options=None)
    text, finish, _ = streamed(answer) if stream else (answer.choices[0].text, answer.choices[0].finish_reason, None)
    assert text == whole[: whole.index(stop)] and finish == "stop"
    # What began like a stop string, and was none, is sent.
    prefix = complete(client, prompt, 21, stop=[whole[20] + "!!"], stream=False)
    assert prefix.choices[0].text == whole[:21] and prefix.choices[0].finish_reason == "length"
    assert server.everything_is_free()


def test_an_end_token_ends_the_text_before_it(server, client):
    prompt = prompt_of(6)
    tokens = right(prompt, 30).encode()
    end = next(i for i in range(5, 30) if tokens[i] not in tokens[:i])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.api, "served", dataclasses.replace(server.api.served, eos_token_ids=(tokens[end],)))
        answer = complete(client, prompt, 30, logprobs=0)
        text, finish, usage = streamed(
            complete(client, prompt, 30, stream=True, stream_options={"include_usage": True})
        )
    assert answer.choices[0].text == text == tokens[:end].decode()
    assert answer.choices[0].finish_reason == finish == "stop" and usage == answer.usage
    assert usage.completion_tokens == end + 1 == len(answer.choices[0].logprobs.tokens)


def test_logprobs():
    with Running(new_engine(Smooth())) as running, running.client() as smooth:
        answer = complete(smooth, prompt_of(4), 5, logprobs=2).choices[0]
        assert len(answer.logprobs.tokens) == 5 and "".join(answer.logprobs.tokens) == answer.text
        assert answer.logprobs.text_offset == [0, 1, 2, 3, 4]
        for token, value, top in zip(
            answer.logprobs.tokens, answer.logprobs.token_logprobs, answer.logprobs.top_logprobs
        ):
            assert top[token] == value == max(top.values()) and len(top) == 2
        assert complete(smooth, prompt_of(4), 5).choices[0].text == answer.text


@pytest.mark.long
def test_draws_bias_and_penalties():
    with Running(new_engine(Smooth())) as running, running.client() as smooth:
        plain = complete(smooth, prompt_of(4), 5).choices[0].text
        biased = complete(smooth, prompt_of(4), 5, logit_bias={"48": 100}).choices[0]
        assert biased.text == "00000"
        drawn = {"temperature": 5.0, "top_p": 0.9}
        first, second, other = (complete(smooth, prompt_of(4), 9, seed=s, **drawn).choices[0].text for s in (1, 1, 2))
        assert first == second != other
        only = complete(smooth, prompt_of(4), 5, temperature=5.0, extra_body={"top_k": 1}).choices[0]
        assert only.text == plain
        penalised = complete(smooth, prompt_of(4), 30, presence_penalty=2, frequency_penalty=2).choices[0].text
        assert len(set(penalised)) > len(set(complete(smooth, prompt_of(4), 30).choices[0].text))


def test_models_health_and_metrics(server, client):
    assert [model.id for model in client.models.list()] == ["summing"]
    assert client.models.retrieve("summing").id == "summing"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    status, body = server.ask("GET", "/health")
    assert status == 200 and json.loads(body)["status"] == "ok"
    names = "requests_total", "generated_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"
    names += "time_per_token_seconds_count", "prefix_hit_tokens_total", "request_seconds_count"
    before = {name: server.metric(name) for name in names if name != "requests_total"}
    for _ in range(3):
        complete(client, prompt_of(5, 70), 9)
    wait(lambda: not server.api._jobs)
    gained = {name: server.metric(name) - value for name, value in before.items()}
    assert gained.pop("prefix_hit_tokens_total") >= 68
    assert gained == {
        "generated_tokens_total": 27,
        "prompt_tokens_total": 210,
        "time_to_first_token_seconds_count": 3,
        "time_per_token_seconds_count": 24,
        "request_seconds_count": 3,
    }
    assert server.metric("pages ") == 599 and server.metric("pages_used") == 0 < server.metric("pages_idle")
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0


# Refusals.


def test_the_client_sees_its_own_errors(server, client):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, "1", extra_body={"n": 2})
    assert refused.value.param == "n" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="is not served"):
        complete(client, "1", model="other")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
        (b'{"prompt": NaN}', 400, "no number of JSON"),
        (b"\xff\xfe{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"[1]", 400, "must be an object"),
        (b'{"prompt": "' + b"1" * 100_001, 413, "more than 100000 bytes"),
    ],
    ids=["empty", "cut", "nan", "bytes", "deep", "list", "large"],
)
def test_bodies_that_are_none(server, body, status, message):
    got, answer = server.ask("POST", "/v1/completions", body)
    assert got == status and message in json.loads(answer)["error"]["message"]


def test_other_paths_and_types(server):
    assert server.ask("GET", "/v1/completions")[0] == 405 and server.ask("POST", "/v1/embeddings", {})[0] == 404
    status, body = server.ask("POST", "/v1/completions", b"{}", content_type="text/plain")
    assert status == 415 and "application/json" in json.loads(body)["error"]["message"]


def test_a_key():
    with Running(new_engine(), key="secret") as running:
        body = {"model": "summing", "prompt": "1", "max_tokens": 1}
        for given in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
            assert running.ask("POST", "/v1/completions", body, **given)[0] == 401
        assert running.ask("GET", "/v1/models")[0] == 401 and running.ask("GET", "/health")[0] == 200
        assert complete(running.client(key="secret"), "1", 3).choices[0].text == right("1", 3)
        with pytest.raises(openai.AuthenticationError):
            complete(running.client(key="other"), "1", 3)


# What goes wrong.


@pytest.mark.parametrize("stream", [False, True])
def test_scores_that_are_not_finite_are_an_error(server, client, stream):
    with pytest.raises(openai.APIError, match="logits are not finite") as failed:
        answer = complete(client, POISONED, 5, stream=stream)
        assert stream
        list(answer)
    assert stream or failed.value.status_code == 500
    assert complete(client, "12", 5).choices[0].text == right("12", 5)


def test_many_streams_of_which_a_third_is_cut_off(server):
    """No page is lost, nobody else waits for ever, every other text is that of `generate`."""
    count, new = 64, 40

    async def one(client, number):
        stream = await complete(client, prompt_of(number), new, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if number % 3 == 0 and len(text) > number % 7:
                await stream.close()
                return None
        return text

    async def all_of_them():
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, number) for number in range(count)))

    texts = asyncio.run(all_of_them())
    for number, text in enumerate(texts):
        assert text is None if number % 3 == 0 else text == right(prompt_of(number), new)
    assert server.everything_is_free()


def raw(server, prompt, count, **options):
    """A connection that has asked for a stream."""
    made = socket.socket()
    if "buffer" in options:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["buffer"])
    made.settimeout(60)
    made.connect(("127.0.0.1", server.port))
    body = json.dumps({"model": "summing", "prompt": prompt, "max_tokens": count, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    made.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    return made


def text_of_stream(data):
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


def test_a_reader_that_does_not_read_holds_nobody_up(server, client):
    prompt, count = prompt_of(8), 1900
    with raw(server, prompt, count, buffer=4096) as slow:
        for number in range(3):
            assert complete(client, prompt_of(number), 9).choices[0].text == right(prompt_of(number), 9)
        wait(lambda: not server.engine.scheduler.running, 60)  # its row and pages are free again
        parts = []
        while part := slow.recv(1 << 16):
            parts.append(part)
    assert text_of_stream(b"".join(parts)) == right(prompt, count)
    assert server.everything_is_free()


def test_clients_that_go_without_a_word(server):
    """Before their body has come, while they wait, and while a whole answer is being made: the engine drops them."""
    counters = server.engine.scheduler.counters
    cancelled = counters.cancelled
    for sent in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port)) as made:
            made.sendall(sent)
    gone = [raw(server, prompt_of(number), 1500) for number in range(20)]
    for made in gone:
        assert made.recv(1)  # else a server that is slow sees it gone before it has read its body
        made.close()
    body = json.dumps({"model": "summing", "prompt": "1", "max_tokens": 1900})
    with socket.create_connection(("127.0.0.1", server.port)) as made:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        made.sendall(f"{head}\r\n\r\n{body}".encode())
        wait(lambda: server.engine.scheduler.running)
    assert server.everything_is_free() and counters.cancelled >= cancelled + 15  # some may have been quicker


def slow_down(engine, seconds):
    step = engine.step
    engine.step = lambda: (time.sleep(seconds), step())[1]


def test_a_queue_has_an_end():
    engine = new_engine()
    slow_down(engine, 0.01)
    with Running(engine, queue=2) as running, running.client() as client:
        streams = [complete(client, prompt_of(i), 500, stream=True) for i in range(10)]
        with pytest.raises(openai.RateLimitError) as refused:
            complete(client, "1", 1)
        assert refused.value.code == "queue_full" and refused.value.response.headers["retry-after"] == "1"
        wait(lambda: running.metric("requests_running") == 8 and running.metric("requests_waiting") == 2)
        for stream in streams:
            stream.close()
        wait(lambda: running.api.runner.open == 0)
        assert complete(client, "1", 2).choices[0].text == right("1", 2)
        assert running.everything_is_free()


def test_a_restart_under_load():
    """What runs is finished, what comes is refused, and the next server on the port serves."""
    engine = new_engine()
    slow_down(engine, 0.005)
    outcomes, lock = [], threading.Lock()
    running = Running(engine, drain=30)
    port = running.port

    def load(number):
        client = running.client()
        for round_ in range(100):
            try:
                prompt = prompt_of(number + 8 * round_)
                text, *_ = streamed(complete(client, prompt, 30, stream=True))
                outcome = text == right(prompt, 30)
            except openai.APIStatusError as error:
                outcome = error.status_code
            except openai.APIConnectionError:
                outcome = "no server"
            except openai.APIError:
                outcome = "cut off"
            with lock:
                outcomes.append(outcome)
            if outcome is not True:
                return

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    with running:
        for thread in threads:
            thread.start()
        wait(lambda: len(outcomes) > 8)
        running.server.drain()
        wait(lambda: running.api.runner.refusing)
        status, body = running.ask("GET", "/health")
        assert status == 503 and json.loads(body)["status"] == "draining"
    for thread in threads:
        thread.join(30)
    assert set(outcomes) <= {True, 503, "no server"} and outcomes.count(True) > 8
    assert running.everything_is_free()
    with Running(new_engine(), port=port) as again:
        assert complete(again.client(), "1", 4).choices[0].text == right("1", 4)


@pytest.mark.parametrize(("drain", "again"), [(0.3, False), (60, True)], ids=["its time is over", "a second signal"])
def test_what_does_not_finish_ends_with_an_error(drain, again):
    engine = new_engine()
    slow_down(engine, 0.02)
    with Running(engine, drain=drain) as running:
        stream = complete(running.client(), prompt_of(1), 1900, stream=True)
        next(iter(stream))
        running.server.drain()
        if again:
            wait(lambda: running.api.runner.refusing)
            running.server.drain()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
    assert running.everything_is_free()


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_does_not_end_holds_up_no_end(monkeypatch, caplog, stream):
    """A compilation takes minutes. The clients have their error before, and the log has no traceback."""
    monkeypatch.setattr("jax_sparse_mla.server.runner.STOP_SECONDS", 0.2)
    engine, entered, ending = new_engine(), threading.Event(), threading.Event()
    step = engine.step
    engine.step = lambda: (entered.set(), ending.wait(20), step())[2]
    failed = []

    def ask():
        with pytest.raises(openai.APIError, match="the server is shutting down") as error:
            list(complete(running.client(), "1", 5, stream=stream))
        failed.append(error.value)

    with Running(engine, drain=0) as running:
        client = threading.Thread(target=ask)
        client.start()
        assert entered.wait(20)
    client.join(20)
    ending.set()
    wait(lambda: not running.api.runner.open)
    assert running.api.runner.stop() and not engine.scheduler.running
    assert stream or failed[0].status_code == 503
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_requests_come_from_any_thread():
    told, texts = {}, {}

    def notify(states, _):
        for request, count, ended in states:
            told[request] = count, ended

    runner = Runner(new_engine(), 200, notify)
    runner.start()

    def submit(thread):
        for number in range(thread, 120, 6):
            prompt = prompt_of(number)
            request = Request(list(prompt.encode()), 7)
            texts[request] = right(prompt, 7)
            runner.submit(request)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(lambda: len(told) == 120 and not runner.open)
    assert runner.stop() and set(told.values()) == {(7, "length")}
    assert all(bytes(request.output).decode() == text for request, text in texts.items())
    with pytest.raises(Refused, match="shutting down"):
        runner.submit(Request([1], 1))


def test_what_has_not_come_to_the_engine_ends_as_the_others_do():
    """503 in the protocol, not 500: the server ends, and has not failed."""
    ends = []
    runner = Runner(new_engine(), 10, lambda states, _: ends.extend(ended for _, _, ended in states))
    runner.submit(Request([1], 5))
    runner.stop()
    runner.start()
    wait(lambda: ends)
    assert ends == ["aborted"] and not runner.open


def test_what_comes_during_a_step_that_fails_is_answered():
    engine, entered, failing, ends = new_engine(), threading.Event(), threading.Event(), []

    def step():
        entered.set()
        failing.wait(20)
        raise RuntimeError("the device says no")

    engine.step = step
    runner = Runner(engine, 10, lambda states, _: ends.extend((request, ended) for request, _, ended in states))
    runner.start()
    first, second = Request([1], 5), Request([2], 5)
    runner.submit(first)
    assert entered.wait(20)
    runner.submit(second)
    failing.set()
    wait(lambda: len(ends) == 2)
    assert dict(ends) == {first: "failed", second: "failed"} and "the device says no" in second.error
    with pytest.raises(Refused, match="the device says no"):
        runner.submit(Request([3], 1))


def test_a_step_that_fails_answers_everybody():
    engine, ask = new_engine(), {"model": "summing", "prompt": "12", "max_tokens": 1900}

    def fails(*_):
        raise RuntimeError("the device says no")

    with Running(engine) as running, running.client() as client:
        slow_down(engine, 0.005)
        streams = [complete(client, prompt_of(i), 1900, stream=True) for i in range(12)]  # 4 of them wait
        whole = []
        waiting = threading.Thread(target=lambda: whole.append(running.ask("POST", "/v1/completions", ask)))
        waiting.start()
        wait(lambda: running.api.runner.open == 13)
        engine._unpack = fails
        for stream in streams:
            with pytest.raises(openai.APIError, match="before its time"):
                list(stream)
        waiting.join(20)
        assert whole[0][0] == 500
        status, body = running.ask("GET", "/health")
        assert status == 503 and json.loads(body)["status"] == "unhealthy"
        assert "the device says no" in json.loads(body)["reason"] and running.metric("healthy") == 0
        with pytest.raises(openai.InternalServerError) as refused:
            complete(client, "1", 1)
        assert refused.value.status_code == 503
        assert isinstance(running.api.runner.failure, RuntimeError)


def test_the_load_test(server, monkeypatch, tmp_path, capsys):
    from benchmarks import serve_load

    monkeypatch.setattr(serve_load, "WORDS", ["0", "12", "345"])  # tokens of this model
    monkeypatch.setenv("OUT", str(tmp_path))
    words = ["", "--url", server.url, "--rate", "50", "200", "--requests", "12", "--prompt", "20", "--new-tokens", "6"]
    monkeypatch.setattr("sys.argv", words)
    assert serve_load.main() == 0
    rows = json.loads((tmp_path / "serve_load.json").read_text())["rows"]
    assert [(row["rate"], row["done"], row["refused"], row["failed"]) for row in rows] == [
        (50, 12, 0, 0),
        (200, 12, 0, 0),
    ]
    for row in rows:
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"] < 20_000
        assert row["between_tokens_ms"]["p50"] >= 0 and row["requests_per_s"] > 0
    assert server.everything_is_free() and "first token: p50" in capsys.readouterr().out
