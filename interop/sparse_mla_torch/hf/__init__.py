"""transformers' DeepSeek-V3.2 and V4 models, served from paged caches.

Importing the package itself imports neither torch nor transformers.

Raises:
  ImportError: torch or transformers is missing, or transformers is older than these models.
"""

import importlib.util
import re

from jax_sparse_mla.packages import version

OLDEST_TRANSFORMERS = (5, 23)  # as the extra `hf` asks for

for _name in ("torch", "transformers"):
    if importlib.util.find_spec(_name) is None:
        raise ImportError(f"no package {_name}")
_installed = version("transformers")  # None of one without metadata
if _installed and tuple(map(int, re.findall(r"\d+", _installed)[:2])) < OLDEST_TRANSFORMERS:
    _oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    raise ImportError(
        f"transformers {_installed} is installed, and sparse_mla_torch.hf needs {_oldest} or newer: "
        f'pip install "transformers>={_oldest}"'
    )
