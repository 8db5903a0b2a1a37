"""A request: what it asks for, and how far it is."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
      temperature: 0 takes the most likely token; above, tokens are drawn from the softmax of logits / temperature.
      top_p: draws come from the fewest most likely tokens whose probabilities sum to at least this, and from tokens as
        likely as the last of them; 0 < top_p ≤ 1.
      seed: seeds the draws by its last 32 bits. A token depends on the seed and on its own position, not on who else is
        served.

    Raises:
      TypeError: a value that is no number, or a seed that is no integer.
      ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        object.__setattr__(self, "seed", _integer("Sampling: seed", self.seed))


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _integers(name: str, values: Iterable[int]) -> list[int]:
    try:
        return list(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}: {values!r:.80}") from None


GREEDY = Sampling()

# How a request can end: by one of its end tokens, with `max_new_tokens`, by `cancel`, by `Engine.abort`, with `error`.
STOP, LENGTH, CANCELLED, ABORTED, FAILED = ENDS = ("stop", "length", "cancelled", "aborted", "failed")
MOST_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of a token by the model's own logits, before `adjust`, temperature and top_p.

    Attributes:
      value: of the token that was chosen.
      top: (token, log-probability) of the most likely ones, in order.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


class CallbackError(RuntimeError):
    """What a request's `on_token` or `on_end` raised, its `__cause__`: the engine goes on with the other requests."""


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and the tokens generated for it. An engine serves it once.

    Attributes:
      prompt: tokens to read, at least one: a sequence of integers, which becomes a list.
      max_new_tokens: tokens to generate at most, at least one.
      output: the tokens generated so far, those that the host has read.
      margins: for each output token, the distance of the best logit from the second best, as a share of the best
        one's size; NaN for a token that was imported.
      row: in the request tables, while it is being served.
      computed: tokens whose K rows are cached, or will be by the steps that run.
      sampling: how tokens are chosen; not to be changed once a step has served the request.
      eos_token_ids: tokens that end the request, and are its last; none by default.
      return_selected: whether `selected` grows by what the request's steps attend to.
      replay: int32 `[layers that select, n, k]`, the positions to attend to at its first n tokens instead of selecting:
        the `selected` of an earlier run; it becomes an array.
      forced: tokens that it takes instead of its own choices, for comparisons; choices follow when they are used up.
      top_logprobs: asks for `logprobs`, with so many of the most likely tokens, at most `MOST_LOGPROBS`; None: none.
      logprobs: for each output token its `Logprob`, where they are asked for.
      adjust: parameters of the engine's `logits_hook`; none leaves the logits as they are.
      on_token: called with the request and each token as it is read.
      on_end: called with the request once it has ended, however it did; `ended` says how.
      ended: how it ended, one of ENDS; None before.
      cancelled: set by `cancel`; the engine then drops the request before its next step.
      error: why the engine ended the request before its time: its logits were not finite, or a step failed. None else.

    Raises:
      TypeError: tokens that are not sequences of integers, `max_new_tokens` that is no integer, no Sampling.
      ValueError: `top_logprobs` out of its range.
    """

    prompt: list[int]
    max_new_tokens: int
    output: list[int] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)
    row: int | None = None
    computed: int = 0
    sampling: Sampling = GREEDY
    eos_token_ids: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    return_selected: bool = False
    replay: np.ndarray | None = None
    top_logprobs: int | None = None
    logprobs: list[Logprob] = dataclasses.field(default_factory=list, init=False)
    adjust: tuple[float, ...] = ()
    on_token: Callable[[Request, int], None] | None = None
    on_end: Callable[[Request], None] | None = None
    cancelled: bool = False
    error: str | None = None
    ended: str | None = dataclasses.field(default=None, init=False)
    # The engine's own.
    _selected: list[np.ndarray] = dataclasses.field(default_factory=list, init=False, repr=False)
    attended: int = dataclasses.field(default=0, init=False, repr=False)  # tokens whose positions are known
    # The scheduler's own.
    submitted: bool = dataclasses.field(default=False, init=False, repr=False)
    unread: int = dataclasses.field(default=0, repr=False)  # tokens that running steps choose
    reread: int = dataclasses.field(default=0, repr=False)  # after a preemption, tokens to read again
    digests: list[bytes] | None = dataclasses.field(default=None, repr=False)  # of the pages that it reads
    cuts: tuple[int, ...] = dataclasses.field(default=(), repr=False)  # lengths at which a chunk ends

    def __post_init__(self):
        self.prompt = _integers("Request: prompt", self.prompt)
        self.max_new_tokens = _integer("Request: max_new_tokens", self.max_new_tokens)
        self.eos_token_ids = tuple(_integers("Request: eos_token_ids", self.eos_token_ids))
        self.forced = tuple(_integers("Request: forced", self.forced))
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"Request: sampling must be a Sampling, got {type(self.sampling).__name__}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MOST_LOGPROBS:
            raise ValueError(f"Request: top_logprobs must be from 0 to {MOST_LOGPROBS}, got {self.top_logprobs}")
        self.adjust = tuple(map(float, self.adjust))
        if self.replay is not None:
            self.replay = np.asarray(self.replay)
            if self.replay.dtype != np.int32 or self.replay.ndim != 3:
                got = f"{self.replay.dtype} {list(self.replay.shape)}"
                raise TypeError(f"Request: replay must be int32 [layers that select, tokens, k], got {got}")
            self.attend(self.replay)

    @property
    def selected(self) -> np.ndarray | None:
        """int32 `[layers that select, n, k]`, the positions attended to at its first n tokens: those of `replay`, then
        those that `return_selected` has read. None where there are none."""
        if len(self._selected) > 1:
            self._selected = [np.concatenate(self._selected, axis=1)]
        return self._selected[0] if self._selected else None

    @property
    def replays(self) -> bool:
        """Whether its next token attends to positions that are known."""
        return self.computed < self.attended

    def attend(self, positions: np.ndarray) -> None:
        """Takes what was attended to at the next tokens behind those that are known."""
        self._selected.append(positions)
        self.attended += positions.shape[1]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def tokens_at(self, start: int, count: int) -> list[int]:
        """`tokens[start : start + count]`; prompt and output are not joined for it."""
        behind = start - len(self.prompt)
        if behind >= 0:
            return self.output[behind : behind + count]
        return self.prompt[start : start + count] + self.output[: max(0, behind + count)]

    @property
    def prefill_len(self) -> int:
        """Tokens that are read in chunks; decoding begins behind them."""
        return max(len(self.prompt), self.reread)

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.prompt) or self.computed < self.reread

    @property
    def finished(self) -> bool:
        if self.cancelled or self.error is not None or len(self.output) >= self.max_new_tokens:
            return True
        return bool(self.eos_token_ids) and bool(self.output) and self.output[-1] in self.eos_token_ids

    @property
    def asks_more(self) -> bool:
        """Whether the choice of its tokens takes more than `sampling`."""
        return self.top_logprobs is not None or bool(self.adjust)

    def end(self, how: str) -> None:
        """Says once how it ended, and calls `on_end`."""
        if self.ended is None:
            self.ended = how
            if self.on_end is not None:
                self.on_end(self)

    def cancel(self) -> None:
        """Asks the engine to drop the request before its next step; the output so far stays."""
        self.cancelled = True

    def take(self, token: int, margin: float, logprob: Logprob | None = None) -> None:
        """Takes the next token, or the forced one in its place."""
        if len(self.output) < len(self.forced):
            token = self.forced[len(self.output)]
        self.margins.append(margin)
        if logprob is not None and self.top_logprobs is not None:
            self.logprobs.append(dataclasses.replace(logprob, top=logprob.top[: self.top_logprobs]))
        self.output.append(token)

    def tell(self) -> None:
        """Calls `on_token` with the last token."""
        if self.on_token is not None:
            self.on_token(self, self.output[-1])
