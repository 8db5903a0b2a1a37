"""Continues requests from hand-over files; prints their tokens by model, as JSON.

Run by test_handover in a process of its own: `handover_process.py MAX_NEW_TOKENS FILES`, FILES a JSON object of lists.
"""

import json
import sys

from hf_models import new_engine
from sparse_mla_torch.handover import import_request


def continued(name, files, max_new_tokens):
    # Other pages than where the requests come from.
    engine = new_engine(name, trace=False, seed=5)
    requests = [import_request(engine, file, max_new_tokens) for file in files]
    engine.run(requests)
    return [request.output for request in requests]


if __name__ == "__main__":
    files = json.loads(sys.argv[2])
    print(json.dumps({name: continued(name, files[name], int(sys.argv[1])) for name in files}))
