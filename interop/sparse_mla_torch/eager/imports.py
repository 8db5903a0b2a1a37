"""What the process leaves out when it imports torch and transformers: more than half of their seconds."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# transformers imports them where they are installed: for losses of object detection, for sound and for images.
UNUSED = "scipy", "torchaudio", "torchvision"


def import_eager() -> type:
    """Imports `model.Eager` without what an eager model on one device never calls, and returns it.

    It is for a process of its own, of which it changes the modules for good: `UNUSED` packages cannot be imported, and
    torch says that it has no `torch.distributed`. torch's compiler is not imported before it is asked for.
    """
    gc.disable()  # it would go over the same modules again and again
    import torch

    sys.modules.update(dict.fromkeys(UNUSED))
    torch.distributed.is_available = lambda: False  # as in a torch that was built without it
    # If a transformers wants more of the compiler than its marks, the import below is the first that succeeds.
    with contextlib.suppress(Exception), _marks_of_the_compiler(torch):
        importlib.import_module("transformers.masking_utils")
        importlib.import_module("sparse_mla_torch.eager.model")
    from sparse_mla_torch.eager.model import Eager

    gc.freeze()
    gc.enable()
    return Eager


@contextlib.contextmanager
def _marks_of_the_compiler(torch: types.ModuleType) -> Iterator[None]:
    """Within it, `torch._dynamo` has only decorators: they tell it how to compile a function, and do nothing here."""
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    marks = types.ModuleType(name)
    marks.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # its modules can be imported
    marks.allow_in_graph = marks.assume_constant_result = marks.disable = _mark
    sys.modules[name] = torch._dynamo = marks
    try:
        yield
    finally:
        del sys.modules[name], torch._dynamo


def _mark(function: Callable | None = None, *_: Any, **__: Any) -> Callable:
    """The function as it is."""
    return function or _mark
