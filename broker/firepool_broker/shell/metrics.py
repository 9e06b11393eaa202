"""Figures for Prometheus, fed by the runner. Names follow the words of spec §1; units last.

Nothing here decides; `api` only renders the registry.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_START_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.012, 0.02, 0.05, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class HandleTimes(Collector):
    """Histogram of `Engine.handle` calls (the paper's time under the lock). Ten calls a job: a library's would cost each
    of them more than the clock that it reads."""

    BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)

    def __init__(self) -> None:
        #: Calls by bucket; the last one has no upper bound.
        self._counts = [0] * (len(self.BOUNDS_S) + 1)
        self._sum_s = 0.0
        self.longest_s = 0.0

    def took(self, seconds: float) -> None:
        """One call took this long."""
        self._counts[bisect_left(self.BOUNDS_S, seconds)] += 1
        self._sum_s += seconds
        if seconds > self.longest_s:
            self.longest_s = seconds

    def collect(self) -> Iterator[Metric]:
        """The figures as families."""
        below = accumulate(self._counts)
        names = [*(repr(bound) for bound in self.BOUNDS_S), "+Inf"]
        buckets = list(zip(names, map(float, below), strict=True))
        yield HistogramMetricFamily(
            "firepool_engine_handle_s", "One Engine.handle call", buckets=buckets, sum_value=self._sum_s
        )
        yield GaugeMetricFamily("firepool_engine_handle_longest_s", "Longest Engine.handle call", self.longest_s)


class Metrics:
    """One broker's registry; a broker that is made twice in a process (tests) has two."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self.submitted = Counter("firepool_jobs_submitted", "Submissions accepted durably", ["sku"], registry=reg)
        self.refused = Counter("firepool_jobs_refused", "Submissions refused at once", ["code"], registry=reg)
        self.replayed = Counter("firepool_jobs_replayed", "Submissions answered by their key", registry=reg)
        self.started = Counter(
            "firepool_attempts_started", "Starts committed", ["sku", "path", "why_not_warmer"], registry=reg
        )
        self.ended = Counter("firepool_jobs_ended", "Jobs that became terminal", ["sku", "state", "code"], registry=reg)
        self.requeued = Counter(
            "firepool_attempts_requeued", "Attempts that ended in a re-queue", ["sku"], registry=reg
        )
        self.first_instruction_s = Histogram(
            "firepool_submit_to_first_instruction_s",
            "Submission to first instruction",
            ["sku", "path"],
            buckets=_START_BUCKETS,
            registry=reg,
        )
        self.handle = HandleTimes()
        reg.register(self.handle)
        self.ticks_that_helped = Gauge(
            "firepool_ticks_that_helped", "Fallback ticks that dispatched what no event had", registry=reg
        )
        self.strikes = Counter("firepool_agent_strikes", "Agent calls with unknown outcome", ["call"], registry=reg)
        self.resets = Counter("firepool_pod_resets", "Resets", ["clean"], registry=reg)
        self.reset_s = Histogram(
            "firepool_pod_reset_s",
            "Reset as the agent took it",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2, 10),
            registry=reg,
        )
        self.pods_created = Counter("firepool_pods_created", "Pods that became ready", ["sku"], registry=reg)
        self.pods_failed = Counter("firepool_pods_failed", "Pods that did not come up", ["sku"], registry=reg)
        self.pods_gone = Counter("firepool_pods_gone", "Pods verified gone", registry=reg)
        self.watch_overflows = Counter("firepool_watch_overflows", "Subscribers told to re-read", registry=reg)
        self.surprises = Counter("firepool_surprises", "Pieces of work that broke unforeseen", registry=reg)
        self.queued = Gauge("firepool_queue_length", "Jobs that wait", ["sku"], registry=reg)
        self.pods = Gauge("firepool_pods", "Pods by state", ["sku", "state"], registry=reg)

    def standing(self, pods: Mapping[tuple[str, str], int], queued: Mapping[str, int], ticks_that_helped: int) -> None:
        """What there is right now: pods by SKU and state, waiting jobs by SKU."""
        self.pods.clear()
        for (sku, state), count in pods.items():
            self.pods.labels(sku, state).set(count)
        for sku, count in queued.items():
            self.queued.labels(sku).set(count)
        self.ticks_that_helped.set(ticks_that_helped)

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
