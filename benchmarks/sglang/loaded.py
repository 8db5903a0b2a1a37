"""SGLang's server code imported on a GPU, with refusing stand-ins for the packages that are not installed.

SGLang imports far more than its attention needs. What is absent is listed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from benchmarks import plugin_log
from benchmarks.absent import Absent

# Packages that SGLang's modules import and its FlashMLA attention on SM90 does not call.
MAY_BE_ABSENT = ("sgl_kernel", "IPython", "torchaudio", "soundfile", "timm", "gguf", "kernels")


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
        self._absent, self.said = absent, plugin_log.lines_of("sglang")
        importlib.import_module("sglang")  # where a package is missing, its name is the error: the plugin logs its own
        from sparse_mla_torch.plugins import sglang as plugin

        plugin.register()  # as SGLang does by its entry point, which a checkout that is not installed has not
        importlib.import_module("sglang.srt.plugins").load_plugins()

    @property
    def stand_ins(self) -> list[str]:
        return sorted(self._absent.imported)


def _installed(name: str) -> bool:
    """Whether there is such a package; a folder of a few of its files is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
