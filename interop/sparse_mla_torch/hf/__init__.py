"""transformers' DeepSeek-V3.2 and V4 models, served from paged caches.

Raises:
  ImportError: transformers is missing, or older than these models.
"""

import re

import transformers

OLDEST_TRANSFORMERS = (5, 23)  # as the extra `hf` asks for

if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < OLDEST_TRANSFORMERS:
    _oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    raise ImportError(
        f"transformers {transformers.__version__} is installed, and sparse_mla_torch.hf needs {_oldest} or newer: "
        f'pip install "transformers>={_oldest}"'
    )
