"""Downloads: start, watch, cancel."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo.api.json_body import json_with_model
from exo.errors import ExoError, InvalidRequest, ModelNotFound
from exo.models.card import resolve
from exo.orchestration.files.activity import as_json
from exo.orchestration.node import StandardNode
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
"""A client of the event stream hears something at least this often."""


class DownloadRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node
        self._tasks = TaskOwner("downloads")

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/download", self.start)
        app.router.add_delete("/v1/download/{model_id:.+}", self.cancel)
        app.router.add_delete("/v1/models/{model_id:.+}", self.remove)
        app.router.add_get("/v1/download/progress", self.progress)
        app.router.add_get("/v1/events", self.events)
        app.on_cleanup.append(self._close)

    async def start(self, http: web.Request) -> web.Response:
        """{"model", "all_nodes", "shard", "wait"} -> 202 and {"model", "nodes"}; with "wait" 200
        when it is over, how it ended on each node, and in "left_out", by the reason, the paths and
        sizes of files that exo does not want. "shard" is "1/3" for what the first of three equal
        shards reads."""
        body = await json_with_model(http)
        for name in ("all_nodes", "wait"):
            if not isinstance(body.get(name, False), bool):
                raise InvalidRequest(f"{name} is true or false", param=name)
        model_id, everywhere = body["model"], body.get("all_nodes", False)
        shard = _shard(body.get("shard"))
        if shard is not None and everywhere:
            raise InvalidRequest("a shard is for one node, not for all_nodes", param="shard")
        resolve(model_id)
        if body.get("wait", False):
            ends = await self._download(model_id, everywhere, shard)
            if (error := ends[self._node.config.node_id]) is not None and len(ends) == 1:
                raise error
            nodes = {node: error.message if error else "ready" for node, error in ends.items()}
            unwanted = await asyncio.to_thread(self._node.store.left_out, model_id)
            left_out = {
                why: {file.path: file.size for file in files} for why, files in unwanted.items()
            }
            return web.json_response({"model": model_id, "nodes": nodes, "left_out": left_out})
        own = self._node.config.node_id
        names = [own, *self._node.membership.alive] if everywhere else [own]
        self._tasks.background(self._run(model_id, everywhere, shard), model_id)
        return web.json_response({"model": model_id, "nodes": names}, status=202)

    async def _download(
        self, model_id: str, everywhere: bool, shard: tuple[int, int] | None
    ) -> dict[str, ExoError | None]:
        """How it ended on each node."""
        if shard is None:
            return await self._node.cluster_files.download(model_id, everywhere=everywhere)
        try:
            await self._node.cluster_files.download_shard(model_id, *shard)
        except ExoError as error:
            return {self._node.config.node_id: error}
        return {self._node.config.node_id: None}

    async def _run(self, model_id: str, everywhere: bool, shard: tuple[int, int] | None) -> None:
        """Who watches has failures from the activity of the node that failed."""
        for node, error in (await self._download(model_id, everywhere, shard)).items():
            if error is not None:
                logger.warning("download of %s on %s: %s", model_id, node, error.message)

    async def remove(self, http: web.Request) -> web.Response:
        """Delete a model's files from this machine."""
        model_id = unquote(http.match_info["model_id"])
        freed = await self._node.cluster_files.remove(model_id)
        return web.json_response(
            {"id": model_id, "object": "model", "deleted": True, "freed": freed}
        )

    async def cancel(self, http: web.Request) -> web.Response:
        """Stop the download of a model on this node; what came is kept."""
        model_id = unquote(http.match_info["model_id"])
        if not self._node.store.cancel(model_id):
            raise ModelNotFound(f"{model_id} is not being downloaded here", param="model")
        return web.json_response({"model": model_id, "cancelled": True})

    async def progress(self, http: web.Request) -> web.Response:
        """What every node is doing for every model, or did last."""
        return web.json_response({"object": "list", "data": self._now()})

    async def events(self, http: web.Request) -> web.StreamResponse:
        """The same as server-sent events: each item when it changes, all of them at first."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        told: dict[tuple[str, str], dict[str, Any]] = {}
        while True:
            change = self._node.activity.next_change()
            for item in self._now():
                key = (item["node_id"], item["model"])
                if told.get(key) != item:
                    told[key] = item
                    await response.write(f"event: progress\ndata: {json.dumps(item)}\n\n".encode())
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await change.wait()
            except TimeoutError:
                await response.write(b": still here\n\n")

    def _now(self) -> list[dict[str, Any]]:
        return [as_json(progress) for progress in self._node.activity.everyone()]

    async def _close(self, app: web.Application) -> None:
        await self._tasks.close()


def _shard(text: Any) -> tuple[int, int] | None:
    """ "2/3" as (2, 3)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text) if isinstance(text, str) else None
    if found is None:
        raise InvalidRequest(f'shard is like "1/3", got {text!r}', param="shard")
    return int(found[1]), int(found[2])
