"""What stands beside speculative decoding: drafts from an oracle, and the comparison with plain decoding; and that no
draft is lost by its place."""

import dataclasses

import jax.numpy as jnp
import pytest

from jax_sparse_mla import DEEPSEEK_V32
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Draft, ForwardOutput
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.speculative import DraftOracle, compare_with_plain


@dataclasses.dataclass(frozen=True)
class Counting:
    """A model without layers, whose tokens hang on the token before and on its position; and its draft layer, if it has
    one, which says the same where it reads the states of its own position."""

    has_draft_layer: bool
    spec = DEEPSEEK_V32
    vocab_size, config = 64, None

    def new_caches(self, **_):
        return ()

    def new_draft(self, params, *, max_requests, **_):
        states, tokens = jnp.zeros((2, max_requests), jnp.int32)
        return Draft(cache=(), states=states, tokens=tokens) if self.has_draft_layer else None

    def forward(self, params, caches, inputs, layers=None):
        chosen = (5 * inputs.tokens + 3 * inputs.positions + inputs.positions // 7) % self.vocab_size
        return ForwardOutput(hidden=chosen, caches=caches, states=inputs.positions)

    def draft(self, params, cache, inputs, states):
        behind = dataclasses.replace(inputs, positions=inputs.positions + 1)
        out = self.forward(params, cache, behind)  # its tokens are those behind the positions
        hidden = jnp.where(states == inputs.positions, out.hidden, (out.hidden + 1) % self.vocab_size)
        return dataclasses.replace(out, hidden=hidden)

    def logits(self, params, hidden):
        return (hidden[:, None] == jnp.arange(self.vocab_size)).astype(jnp.float32)


@pytest.mark.parametrize("has_draft_layer", [False, True])
def test_drafts_of_the_right_places_are_all_kept(has_draft_layer):
    """A draft from a wrong position, token or state is rejected: tokens stay right, and only time is lost."""
    model = Counting(has_draft_layer)
    engine = Engine(model, (), EngineOptions(chunk_size=8, max_batch=2, max_len=64, speculative_steps=3))
    prompts = list(range(11)), [40, 2]
    requests = [Request(prompt, 13) for prompt in prompts]
    engine.run(requests)
    for prompt, request in zip(prompts, requests):
        tokens = list(prompt)
        for at in range(len(prompt) - 1, len(prompt) + 12):
            tokens.append((5 * tokens[at] + 3 * at + at // 7) % 64)
        assert request.output == tokens[len(prompt) :]
    assert engine.accepted == {3: 6}  # a round makes four tokens, the prompt's step one
    # The second draft is wrong, and in the next round the first: two rounds make three tokens.
    engine.propose = lambda request, ahead: 63 if ahead == len(request.output) % 3 else -1
    engine.accepted.clear()
    again = [Request(prompt, 13) for prompt in prompts]
    engine.run(again)
    assert [request.output for request in again] == [request.output for request in requests]
    assert engine.accepted == {0: 8, 1: 8}


def serve(requests):
    """Plain decoding by a toy: a token depends on all tokens before it."""
    for request in requests:
        while len(request.output) < request.max_new_tokens:
            tokens = request.tokens
            request.output.append((31 * sum(tokens) + len(tokens)) % 256)
            request.margins.append(0.01)


def test_the_comparison_goes_on_behind_a_difference():
    expected = [Request([seed, 3], new) for seed, new in enumerate((30, 9, 14))]
    serve(expected)

    def with_token(request, index):
        """The request as decoding would have served it had it chosen another token at `index`."""
        other = (request.output[index] + 1) % 256
        output, margins = [*request.output[:index], other], [*request.margins[:index], 0.5]
        if count := request.max_new_tokens - len(output):
            tail = Request(request.prompt + output, count)
            serve([tail])
            output, margins = output + tail.output, margins + tail.margins
        return Request(request.prompt, request.max_new_tokens, output, margins)

    assert compare_with_plain(serve, expected, expected) == []
    twice = with_token(with_token(expected[1], 2), 5)
    requests = [expected[0], twice, with_token(expected[2], 13)]
    differences = [(d.request, d.index, d.margin) for d in compare_with_plain(serve, requests, expected)]
    assert differences == [(1, 2, 0.5), (1, 5, 0.5), (2, 13, 0.5)]


def test_the_oracle_proposes_plain_tokens():
    served = Request([5, 6], 4, output=[10, 11, 12, 13])
    asked = Request([5, 6], 9, output=[10])
    always, never = DraftOracle([served, Request([5, 6], 1, output=[10])], 1, 0), DraftOracle([served], 0, 0)
    assert [always.propose(asked, ahead) for ahead in range(4)] == [11, 12, 13, -1]
    assert [never.propose(asked, ahead) for ahead in range(4)] == [-1] * 4
    assert always.propose(Request([5], 4), 0) == -1
    often = DraftOracle([served], 0.7, 0)
    assert sum(often.propose(asked, 0) == 11 for _ in range(1000)) == pytest.approx(700, abs=60)
