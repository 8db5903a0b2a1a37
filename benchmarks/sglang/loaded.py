"""SGLang's server code imported on a GPU, with refusing stand-ins for the packages that are not installed.

SGLang imports far more than its attention needs. What is absent is listed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys

from benchmarks.absent import Absent

# Packages that SGLang's modules import and its FlashMLA attention on SM90 does not call.
MAY_BE_ABSENT = ("sgl_kernel", "IPython", "torchaudio", "soundfile", "timm", "gguf", "kernels")
PLUGIN_LOG = "sglang.jax_sparse_mla"


class _Said(logging.Handler):
    """What our plugin says in SGLang's log."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class SGLang:
    """SGLang with its plugins loaded, as its server's processes do it.

    Attributes:
      stand_ins: packages that are not installed and were imported.
      said: the lines that our plugin has logged.
    """

    def __init__(self):
        absent = Absent(tuple(name for name in MAY_BE_ABSENT if not _installed(name)))
        os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"  # the kit gives positions, and not slots
        sys.meta_path.append(absent)
        self._absent, self._said = absent, _Said()
        logging.getLogger(PLUGIN_LOG).addHandler(self._said)
        logging.getLogger(PLUGIN_LOG).setLevel(logging.INFO)
        importlib.import_module("sglang")  # where a package is missing, its name is the error: the plugin logs its own
        from sparse_mla_torch.plugins import sglang as plugin

        plugin.register()  # as SGLang does by its entry point, which a checkout that is not installed has not
        importlib.import_module("sglang.srt.plugins").load_plugins()

    @property
    def stand_ins(self) -> list[str]:
        return sorted(self._absent.imported)

    @property
    def said(self) -> list[str]:
        return list(self._said.lines)


def _installed(name: str) -> bool:
    """Whether there is such a package; a folder of a few of its files is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
