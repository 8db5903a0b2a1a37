"""What `/metrics` says, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jax_sparse_mla.server.runner import Runner

PREFIX = "jax_sparse_mla_"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts of requests and tokens, times, and what the engine has in use when they are read."""

    def __init__(self, runner: Runner):
        self._registry, self._runner = CollectorRegistry(), runner
        made = {"registry": self._registry}
        ends = "Requests that have ended, by how: stop, length, cancelled, aborted, failed"
        self.ended = Counter(PREFIX + "requests", ends, ["endpoint", "end"], **made)
        refused = "Requests that were refused, by status of HTTP"
        self.refused = Counter(PREFIX + "requests_refused", refused, ["status"], **made)
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens", "Tokens of prompts that were taken", **made)
        self.new_tokens = Counter(PREFIX + "generated_tokens", "Tokens that were generated", **made)
        first = "Seconds from a request's arrival to its first token"
        self.first_token = Histogram(PREFIX + "time_to_first_token_seconds", first, buckets=_LONG, **made)
        each = "Seconds from one token of a request to its next"
        self.next_token = Histogram(PREFIX + "time_per_token_seconds", each, buckets=_SHORT, **made)
        whole = "Seconds from a request's arrival to its end"
        self.whole = Histogram(PREFIX + "request_seconds", whole, buckets=_LONG, **made)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own numbers, as they are now."""
        scheduler, runner = self._runner.engine.scheduler, self._runner
        running, pools = len(scheduler.running), [share.pool for share in scheduler.shares]
        total = sum(pool.num_pages - 1 for pool in pools)
        idle, free = sum(len(pool.pages.idle) for pool in pools), sum(len(pool.pages.free) for pool in pools)
        gauges = {
            "requests_running": (running, "Requests that the engine serves"),
            "requests_waiting": (max(0, runner.open - running), "Requests in the queue"),
            "pages": (total, "Pages of the KV pool"),
            "pages_used": (total - free - idle, "Pages in use"),
            "pages_idle": (idle, "Pages that are kept for their prefix"),
            "healthy": (int(runner.failure is None), "0 once the engine has failed"),
        }
        for name, (value, what) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, what, value)
        counters = scheduler.counters
        hits = "Tokens of prompts that were not computed, because others had read them"
        yield CounterMetricFamily(PREFIX + "prefix_hit_tokens", hits, counters.reused)
        yield CounterMetricFamily(PREFIX + "preemptions", "Requests that gave back their pages", counters.preempted)
