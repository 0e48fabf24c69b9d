"""Models to choose from: what there is and where, whether it fits, and having it loaded or not."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo.api.http.bodies import Body, read_body
from exo.api.http.routes import Route
from exo.download.progress import unheard
from exo.errors import InvalidRequest, ModelNotFound
from exo.models.card import DUMMY, ModelCard, registry, resolve
from exo.networking.calls.messages import HeldModel
from exo.orchestration.node import StandardNode
from exo.topology.fit import Free, best, fit


class LoadBody(Body, kw_only=True):
    """POST /v1/load."""

    model: str


class CatalogRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        one = "{model_id:.+}"
        return [
            Route("GET", "/v1/catalog", self.catalog, "Models that can be chosen, and what fits"),
            Route("GET", "/v1/catalog/search", self.search, "Models on the hub, by name: ?q="),
            Route("GET", f"/v1/placement/{one}", self.placement, "Where its layers would go"),
            Route("POST", "/v1/load", self.load, "Load a model; answered when it serves", LoadBody),
            Route("DELETE", f"/v1/load/{one}", self.unload, "Give a model's memory back"),
        ]

    async def catalog(self, http: web.Request) -> web.Response:
        """{"memory": {"here", "cluster", "mixtures"}, "data": [{"id", "name", "size", "nodes",
        "ready", "fits" ("here", "cluster", "part", "no" or null where the size is not known),
        "missing" bytes, "context" tokens, "licence", "kinds", "gguf_repo", "gguf_quantization"
        (the best that fits)}]}. Sizes of what is on no node are about what the registry says; null
        is not known. See `topology.fit`."""
        held = await self._node.cluster_files.held_by_model()
        available = await asyncio.to_thread(self._node.store.available)
        cards = registry() | {card.model_id: card for card in available}
        cards |= {name: ModelCard(name, name) for name in held if name not in cards}
        cards.pop(DUMMY.model_id, None)
        free = self._free()
        for card in available:
            if fit(card.size_bytes or self._size(held.get(card.model_id, {})), free)[0] == "no":
                with_experts = await asyncio.to_thread(self._node.store.with_experts, card)
                cards[card.model_id] = with_experts
        data = [self._entry(card, held.get(name, {}), free) for name, card in cards.items()]
        return web.json_response(
            {
                "object": "list",
                "memory": free.to_json(),
                "data": data,
            }
        )

    def _free(self) -> Free:
        """With what loaded models take."""
        live = self._node.topology().live
        own = live.get(self._node.config.node_id)
        taken = sum(self._node.rings.held_bytes().values())
        total = sum(found.memory_available_bytes for found in live.values())
        mixtures = sum(f.memory_available_bytes for f in live.values() if f.accelerator == "cpu")
        if own is not None and own.accelerator == "cpu":
            mixtures += taken
        here = own.memory_available_bytes if own else 0
        return Free(here + taken, total + taken, mixtures)

    @staticmethod
    def _size(holders: dict[str, HeldModel]) -> int:
        """Bytes of a model that some node has whole; 0: none has."""
        return max((model.size for model in holders.values() if model.whole), default=0)

    def _entry(self, card: ModelCard, holders: dict[str, HeldModel], free: Free) -> dict[str, Any]:
        size = self._size(holders) or card.size_bytes
        fits, missing = fit(size, free, card.expert_bytes)
        return {
            "id": card.model_id,
            "name": card.name,
            "repo": card.repo,
            "size": size or None,
            "nodes": [
                {"node_id": node_id, "size": model.size, "whole": model.whole}
                for node_id, model in sorted(holders.items())
            ],
            "removable": self._node.config.node_id in holders and card.path is None,
            "ready": self._node.plans.of(card.model_id) is not None,
            "fits": fits,
            "missing": missing,
            "context": card.context or None,
            "licence": card.licence or None,
            "kinds": list(card.kinds),
            "gguf_repo": card.gguf,
            "gguf_quantization": best(card.quantizations(), free),
        }

    async def search(self, http: web.Request) -> web.Response:
        words = http.query.get("q", "").strip()
        if not words:
            raise InvalidRequest("expected words to search for, as ?q=", param="q")
        from exo.download.hub_search import search  # slow to import

        free = self._free()
        data = []
        for found in await search(words):
            size = 0 if found.is_gguf else found.size  # one of its quantizations will be taken
            fits, missing = fit(size, free)
            data.append(
                {
                    "id": found.repo,
                    "name": found.repo,
                    "downloads": found.downloads,
                    "size": size or None,
                    "gguf": found.is_gguf,
                    "fits": fits,
                    "missing": missing,
                }
            )
        return web.json_response({"object": "list", "data": data})

    async def placement(self, http: web.Request) -> web.Response:
        """The members a plan made now would have, and the tokens a second predicted for it; nothing
        is loaded. What describes the model is fetched if it is not here."""
        model_id = unquote(http.match_info["model_id"])
        resolve(model_id)
        partition = await self._node.preview(model_id)
        step_s = partition.predicted_step_s
        return web.json_response(
            {
                "model": model_id,
                "members": [
                    {
                        "node_id": member.node_id,
                        "start_layer": member.shard.start_layer,
                        "end_layer": member.shard.end_layer,
                    }
                    for member in partition.members
                ],
                "left_out": [{"node_id": n, "reason": why} for n, why in partition.left_out],
                "predicted_tokens_per_s": round(1 / step_s, 1) if step_s else None,
            }
        )

    async def load(self, http: web.Request) -> web.Response:
        """The plan that serves. What happens meanwhile is in /v1/events."""
        body = await read_body(http, LoadBody)
        resolve(body.model)
        plan = await self._node.ensure_plan(body.model, "", unheard)
        return web.json_response(plan.to_json())

    async def unload(self, http: web.Request) -> web.Response:
        model_id = unquote(http.match_info["model_id"])
        if self._node.plans.of(model_id) is None:
            raise ModelNotFound(f"{model_id} is not loaded", param="model")
        if not await self._node.unload_model(model_id):
            raise InvalidRequest(f"answers of {model_id} are running", param="model")
        return web.json_response({"model": model_id, "unloaded": True})
