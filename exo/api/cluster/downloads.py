"""Downloads: start, watch, cancel."""

from __future__ import annotations

import asyncio
import logging
import re
from urllib.parse import unquote

from aiohttp import web

from exo.api.http.bodies import Body, read_body
from exo.api.http.routes import Route
from exo.errors import ExoError, InvalidRequest, ModelNotFound
from exo.models.card import resolve
from exo.orchestration.files.activity import as_json
from exo.orchestration.node import StandardNode
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)


class DownloadBody(Body, kw_only=True):
    """POST /v1/download."""

    model: str
    all_nodes: bool = False
    wait: bool = False
    shard: str | None = None


class DownloadRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node
        self._tasks = TaskOwner("downloads")

    def routes(self) -> list[Route]:
        one, model = "/v1/download/{model_id:.+}", "/v1/models/{model_id:.+}"
        return [
            Route("POST", "/v1/download", self.start, "Bring a model's files", DownloadBody),
            Route("DELETE", one, self.cancel, "Stop a download"),
            Route("DELETE", model, self.remove, "Delete a model's files"),
            Route("GET", "/v1/download/progress", self.progress, "What every node brings"),
        ]

    async def start(self, http: web.Request) -> web.Response:
        """{"model", "all_nodes", "shard", "wait"} -> 202 and {"model", "nodes"}; with "wait" 200
        when it is over, how it ended on each node, and in "left_out", by the reason, the paths and
        sizes of files that exo does not want. "shard" is "1/3" for what the first of three equal
        shards reads."""
        body = await read_body(http, DownloadBody)
        model_id, everywhere = body.model, body.all_nodes
        shard = None if body.shard is None else _shard(body.shard)
        if shard is not None and everywhere:
            raise InvalidRequest("a shard is for one node, not for all_nodes", param="shard")
        resolve(model_id)
        if body.wait:
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
        everyone = self._node.activity.everyone()
        return web.json_response({"object": "list", "data": [as_json(each) for each in everyone]})

    async def close(self, app: web.Application) -> None:
        """End what runs in the background."""
        await self._tasks.close()


def _shard(text: str) -> tuple[int, int]:
    """ "2/3" as (2, 3)."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if found is None:
        raise InvalidRequest(f'shard is like "1/3", got {text!r}', param="shard")
    return int(found[1]), int(found[2])
