"""Prometheus metrics under vLLM's names, with the prefix `ling3_`.

Counts of requests, tokens and pages are read from the engine at each scrape, so they include requests of other callers
in this process. Times are observed as completions end. On Linux there are also the process's memory, processor time and
open files, as `process_*`. No label has a value that a client can choose.
"""

from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client import core, exposition

from ling3.engine.outputs import RequestOutput, Stats

STEPS = (1.0, 2.5, 5.0)
REQUEST = tuple(step * 10.0**power for power in range(-3, 3) for step in STEPS)
"""Bucket bounds for the times of a request, in seconds: 1 ms to 500 s."""
TOKEN = tuple(step * 10.0**power for power in range(-4, 1) for step in STEPS)
"""Bucket bounds for the times of a token, in seconds: 0.1 ms to 5 s."""


def _used(stats: Stats) -> float:
    return 1 - stats.free_pages / stats.pages if stats.pages else 0.0


GAUGES = {
    "num_requests_running": ("Completions in slots.", lambda stats: stats.running),
    "num_requests_waiting": ("Completions that wait for a slot.", lambda stats: stats.waiting),
    "kv_cache_usage_perc": ("Share of the pages that running completions use.", _used),
}
COUNTERS = {
    "prompt_tokens": (
        "Tokens of prompts, computed or found among known prefixes.",
        lambda stats: stats.prompt_tokens + stats.cached_tokens,
    ),
    "generation_tokens": ("Generated tokens.", lambda stats: stats.output_tokens),
    "num_preemptions": ("How often a completion had to make room for an older one.", lambda stats: stats.preemptions),
    "spec_decode_num_draft_tokens": ("Tokens that speculation guessed.", lambda stats: stats.drafted_tokens),
    "spec_decode_num_accepted_tokens": ("Those of them that were right.", lambda stats: stats.accepted_tokens),
    "prefix_cache_hits": ("Tokens of prompts found among known prefixes.", lambda stats: stats.cached_tokens),
}


TIMES = {
    "queued": ("request_queue_time", "From the queue to a slot", REQUEST),
    "first_token": ("time_to_first_token", "From the queue to the first token", REQUEST),
    "per_token": ("time_per_output_token", "Between two tokens of a completion, on average", TOKEN),
    "total": ("e2e_request_latency", "From the queue to the end of a completion", REQUEST),
}
"""A histogram for each field of a completion's `Timings`: its name, help text and buckets."""


class Metrics:
    """The metrics of one server, in a registry that no other server uses."""

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        prometheus_client.ProcessCollector(registry=self._registry)
        self._stats: Stats | None = None
        self._times = {
            timing: prometheus_client.Histogram(
                f"ling3_{name}_seconds", f"{text}, in seconds.", buckets=bounds, registry=self._registry
            )
            for timing, (name, text, bounds) in TIMES.items()
        }
        self._answers = prometheus_client.Counter(
            "ling3_http_requests", "Requests, by route and status.", ("path", "status"), registry=self._registry
        )

    def ended(self, output: RequestOutput) -> None:
        """Observes the times of a finished request's completions."""
        for completion in output.outputs:
            for timing, histogram in self._times.items():
                if (value := getattr(completion.timings, timing)) is not None:
                    histogram.observe(value)

    def answered(self, path: str, status: int) -> None:
        """Counts a response, by route and status."""
        self._answers.labels(path, str(status)).inc()

    def page(self, stats: Stats, accept: str) -> tuple[bytes, str]:
        """The page to be scraped and its content type, in the format that the header `accept` requests."""
        self._stats = stats
        encode, kind = exposition.choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[Any]:
        """Yields the engine's counts, as the registry expects."""
        stats = self._stats
        if stats is None:
            return
        for name, (text, value) in GAUGES.items():
            yield core.GaugeMetricFamily(f"ling3_{name}", text, value(stats))
        for name, (text, value) in COUNTERS.items():
            yield core.CounterMetricFamily(f"ling3_{name}", text, value(stats))
        ends = core.CounterMetricFamily("ling3_request_success", "Ended completions.", labels=("finished_reason",))
        for reason, count in stats.finished.items():
            ends.add_metric((reason,), count)
        yield ends
