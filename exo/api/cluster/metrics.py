"""/metrics, as Prometheus reads it.

Names follow https://prometheus.io/docs/practices/naming/; what they mean is in docs/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from exo.api.http.routes import Handler, Route
from exo.errors import ExoError
from exo.orchestration.node import StandardNode

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_COUNTED = {
    "reused_tokens": "Tokens of prompts that earlier sequences had computed",
    "drafted_tokens": "Tokens that were guessed and computed ahead",
    "accepted_tokens": "Tokens that were guessed right",
    "preempted": "Times a sequence gave its pages to an older one, to begin again",
}


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, which nobody asks for


class Metrics:
    """What this node's API has served, and what its node does at the time of asking."""

    def __init__(self, node: StandardNode) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(node))
        self._requests = self._counter("exo_requests", "HTTP requests", "route", "status")
        self._errors = self._counter("exo_errors", "Requests that failed, by kind", "code")
        self._prompt = self._counter("exo_prompt_tokens", "Tokens of prompts", "model")
        self._generated = self._counter("exo_generated_tokens", "Tokens generated", "model")
        self._first = Histogram(
            "exo_time_to_first_token_seconds",
            "From the request to its first token",
            ["model"],
            buckets=_FIRST,
            registry=self._registry,
        )
        self._between = Histogram(
            "exo_time_between_tokens_seconds",
            "From one token of an answer to the next",
            ["model"],
            buckets=_BETWEEN,
            registry=self._registry,
        )

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(name, help_, labels, registry=self._registry)

    def routes(self) -> list[Route]:
        summary = "Measurements, as Prometheus reads them"
        return [Route("GET", "/metrics", self.metrics, summary, content="text/plain")]

    async def metrics(self, http: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(self._registry), headers=headers)

    def counting(self) -> Any:
        """A middleware that counts requests by what they asked and how they ended."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "none"
            self._requests.labels(route, str(response.status)).inc()
            return response

        return count

    def failed(self, error: ExoError) -> None:
        self._errors.labels(error.code).inc()

    async def timed(
        self, model: str, prompt_tokens: int, tokens: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """The events of one sequence as they are, counted and timed."""
        self._prompt.labels(model).inc(prompt_tokens)
        first, between = self._first.labels(model), self._between.labels(model)
        generated = self._generated.labels(model)
        before, begun = time.perf_counter(), False
        async for event in tokens:
            if event.token is not None:
                now = time.perf_counter()
                (between if begun else first).observe(now - before)
                before, begun = now, True
                generated.inc()
            yield event


class _NodeCollector(Collector):
    """What is read off the node when somebody asks."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node = self._node
        own = node.config.node_id
        topology = node.topology()
        alive = [view for view in topology.nodes.values() if view.state in ("self", "alive")]
        yield _gauge("exo_nodes", "Nodes of the cluster that live, this one too", len(alive))
        memory = GaugeMetricFamily(
            "exo_node_memory_available_bytes", "Memory models may take", labels=["node"]
        )
        for view in alive:
            if view.capabilities is not None:
                memory.add_metric([view.node_id], view.capabilities.memory_available_bytes)
        yield memory
        sequences = GaugeMetricFamily(
            "exo_sequences", "Sequences at this node's heads", labels=["model", "state"]
        )
        steps = CounterMetricFamily(
            "exo_steps", "Steps through rings headed here", labels=["model"]
        )
        seconds = CounterMetricFamily(
            "exo_step_seconds", "Time that these steps took, all hops", labels=["model"]
        )
        counted = {
            name: CounterMetricFamily(f"exo_{name}", help_, labels=["model"])
            for name, help_ in _COUNTED.items()
        }
        pages = GaugeMetricFamily(
            "exo_kv_pages", "Pages of 64 tokens of rings headed here", labels=["model", "what"]
        )
        for model, loads in node.rings.loads().items():
            for name, family in counted.items():
                family.add_metric([model], sum(getattr(load, name) for load in loads))
            for what in ("capacity", "used", "kept", "shared"):
                pages.add_metric([model, what], sum(getattr(load.cache, what) for load in loads))
            sequences.add_metric([model, "running"], sum(load.running for load in loads))
            sequences.add_metric([model, "waiting"], sum(load.waiting for load in loads))
            steps.add_metric([model], sum(load.steps for load in loads))
            seconds.add_metric([model], sum(load.step_seconds for load in loads))
        yield from (sequences, steps, seconds, pages, *counted.values())
        busy = CounterMetricFamily(
            "exo_engine_seconds", "Time in which this node's engine computed steps", labels=["node"]
        )
        busy.add_metric([own], node.reports.busy_s)
        yield busy
        slowdown = GaugeMetricFamily(
            "exo_node_slowdown", "Times as long as usual that steps take, 0: none", labels=["node"]
        )
        for node_id, times in node.reports.slowdowns().items():
            slowdown.add_metric([node_id], times)
        yield slowdown
        sent = CounterMetricFamily(
            "exo_ring_sent_bytes", "Sent to the next member of rings", labels=["node", "to"]
        )
        for to, count in node.rings.sent_bytes().items():
            sent.add_metric([own, to], count)
        yield sent
        plans = GaugeMetricFamily("exo_ring_members", "Nodes that serve a model", labels=["model"])
        for plan in node.plans:
            plans.add_metric([plan.model_id], len(plan.members))
        yield plans
        downloads = GaugeMetricFamily(
            "exo_download_bytes", "Of downloads under way", labels=["node", "model", "what"]
        )
        for progress in node.activity.everyone():
            if progress.phase == "downloading":
                labels = [progress.node_id or own, progress.model_id]
                downloads.add_metric([*labels, "done"], progress.done)
                downloads.add_metric([*labels, "total"], progress.total)
        yield downloads


def _gauge(name: str, help_: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_, value=value)
