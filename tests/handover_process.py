"""Continues requests from hand-over files; prints the tokens of each model's requests, a line per model.

Run by test_handover in a process of its own: `handover_process.py MAX_NEW_TOKENS MODEL:FILE…`, one model after another.
"""

import dataclasses
import itertools
import json
import sys

from hf_models import OPTIONS, small_model
from sparse_mla_torch.handover import import_request
from sparse_mla_torch.hf.engine import Engine


def main(max_new_tokens, named_files):
    for name, pairs in itertools.groupby((x.split(":", 1) for x in named_files), lambda pair: pair[0]):
        # Other pages than where the requests come from.
        engine = Engine(small_model(name), dataclasses.replace(OPTIONS, trace=False, seed=5))
        requests = [import_request(engine, file, max_new_tokens) for _, file in pairs]
        engine.run(requests)
        print(json.dumps([request.output for request in requests]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
