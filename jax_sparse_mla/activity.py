"""Work that takes seconds says what it is: a command shows it to its user, a library shows nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

# A context around the work that its words describe: `with activity.show("building topk"): …`; a command replaces it.
show: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext
