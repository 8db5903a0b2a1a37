"""What stands beside speculative decoding: drafts from an oracle, and the comparison with plain decoding."""

import pytest

from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.speculative import DraftOracle, compare_with_plain


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
