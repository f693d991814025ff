"""What Prometheus may ask: load, tokens, times to the first token and between tokens, KV use, preemptions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from minillm.engine.request import RequestOutput
from minillm.server.loop import Job, Report

TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """One server's numbers, in a registry of its own. It is the Watcher of an EngineLoop."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("minillm_requests_running", "Samples that the engine is working on", registry=registry)
        self.waiting = Gauge("minillm_requests_waiting", "Samples that wait for a slot", registry=registry)
        self.kv_usage = Gauge("minillm_kv_cache_usage_ratio", "Share of the KV blocks that requests hold", registry=registry)
        self.preemptions = Counter("minillm_preemptions", "Requests that lost their KV to others", registry=registry)
        self.prompt = Counter("minillm_prompt_tokens", "Tokens of prompts whose answer has begun", registry=registry)
        self.cached = Counter("minillm_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry)
        self.generation = Counter("minillm_generation_tokens", "Tokens of answers", registry=registry)
        self.ended = Counter("minillm_requests", "Samples that ended, by reason", ["finish_reason"], registry=registry)
        self.refused = Counter("minillm_requests_refused", "HTTP requests refused, by status", ["status"], registry=registry)
        self.ttft = Histogram(
            "minillm_time_to_first_token_seconds", "From arrival to the first token", buckets=TTFT_BUCKETS, registry=registry
        )
        self.tpot = Histogram(
            "minillm_time_per_output_token_seconds", "Mean gap between the tokens of a sample, once it has ended",
            buckets=TPOT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._new_tokens = self._preemptions = 0

    def sample(self, job: Job, index: int, previous: RequestOutput | None, output: RequestOutput, at: float) -> None:
        count, before = len(output.token_ids), len(previous.token_ids) if previous else 0
        self._new_tokens += max(count - before, 0)  # a stop string takes tokens back
        began = job.began[index] or at
        if previous is None:
            self.ttft.observe(began - job.arrived)
            self.prompt.inc(len(output.prompt_token_ids))
            self.cached.inc(output.num_cached_tokens)
        if output.finished:
            self.ended.labels(output.finish_reason).inc()
            if count > 1:
                self.tpot.observe((at - began) / (count - 1))

    def step(self, report: Report) -> None:
        self.generation.inc(self._new_tokens)
        self._new_tokens = 0
        if report.failures:
            self.ended.labels("error").inc(len(report.failures))
        load = report.load
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_usage.set(load.kv_used / load.kv_total)
        self.preemptions.inc(load.preemptions - self._preemptions)
        self._preemptions = load.preemptions

    def page(self) -> tuple[bytes, str]:
        """The numbers in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
