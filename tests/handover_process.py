"""Continues requests from hand-over files; prints the tokens of each, first by plain decoding, then with drafts.

Run by test_handover in a process of its own: `handover_process.py MODEL MAX_NEW_TOKENS FILE…`.
"""

import dataclasses
import json
import sys

import jax

jax.config.update("jax_platforms", "cpu")

from hf_models import OPTIONS, small_model  # noqa: E402
from sparse_mla_torch.handover import import_request  # noqa: E402
from sparse_mla_torch.hf.engine import Engine  # noqa: E402
from sparse_mla_torch.hf.speculative import DraftOracle, SpeculativeDecoder  # noqa: E402

DRAFTS = 3


def main(name, max_new_tokens, files):
    # Other pages and a longer ring than where the requests come from.
    engine = Engine(small_model(name), dataclasses.replace(OPTIONS, trace=False, seed=5, speculative_steps=DRAFTS))
    plain = [import_request(engine, file, max_new_tokens) for file in files]
    engine.run(plain)
    print(json.dumps([request.output for request in plain]))
    drafted = [import_request(engine, file, max_new_tokens) for file in files]
    engine.run(drafted, advance=SpeculativeDecoder(engine, DRAFTS, DraftOracle(plain, 0.7, seed=1)).advance)
    print(json.dumps([request.output for request in drafted]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
