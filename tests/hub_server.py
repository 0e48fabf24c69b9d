"""A fake at the edge of the world: a server on loopback that speaks the hub's protocol.

As huggingface_hub 2.4 uses it: model info, tree, resolve with HEAD and GET, ranges, ETag and
X-Linked-* headers, large files by a redirect. It counts what it sends, and misbehaves on command.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Fault:
    """The next `times` GETs of a path ("*": any) go wrong.

    `kind`: drop (the connection breaks after `after` bytes), status (answer `status`), wrong (the
    right number of wrong bytes), stall (silence after `after` bytes), short (a length that is a lie
    is told by ending early).
    """

    kind: str
    path: str = "*"
    times: int = 1
    after: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    refuse: int = 0  # 401 or 403 for whoever has no token
    token: str = "let-me-in"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


class HubServer:
    """Runs on a thread of its own until the with block ends."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.rate: float | None = None  # bytes a second of each answer
        self.ranges = True
        self.sent: Counter[str] = Counter()  # bytes of content by path
        self.requests: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._blobs: dict[str, tuple[str, bytes]] = {}
        # By id of the bytes, which live as long as the server.
        self._digests: dict[int, str] = {}
        self._git: dict[int, str] = {}

    def put(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A new commit of a repo; its hash."""
        for data in files.values():
            self._git[id(data)] = git_sha1(data)
        listed = json.dumps({path: self._git[id(data)] for path, data in sorted(files.items())})
        commit = hashlib.sha1(listed.encode()).hexdigest()
        found = self.repos.setdefault(repo, Repo())
        found.commits[commit] = dict(files)
        found.refs[revision] = commit
        for path, data in files.items():
            if is_large(path):
                self._digests[id(data)] = hashlib.sha256(data).hexdigest()
                self._blobs[self._digests[id(data)]] = (path, data)
        return commit

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/api/models", self._search)
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}", self._info)
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/revision/{revision}", self._info)
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/tree/{revision}", self._tree)
        app.router.add_get("/cdn/{sha}", self._large)
        app.router.add_get("/{repo:[^/]+/[^/]+}/resolve/{revision}/{path:.+}", self._resolve)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # Large files come from another host, as the real ones do.
        self.cdn = self.url.replace("127.0.0.1", "localhost")
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def _find(self, http: web.Request) -> tuple[Repo, str, dict[str, bytes]]:
        self.requests.append(f"{http.method} {http.path}")
        repo = self.repos.get(http.match_info["repo"])
        if repo is None:
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "RepoNotFound"})
        if repo.refuse and http.headers.get("Authorization") != f"Bearer {repo.token}":
            code = "GatedRepo" if repo.refuse == 403 else "RepoNotFound"
            refusal = web.HTTPForbidden if repo.refuse == 403 else web.HTTPUnauthorized
            raise refusal(headers={"X-Error-Code": code})
        revision = http.match_info.get("revision", "main")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return repo, commit, repo.commits[commit]

    def _fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.path in ("*", path):
                fault.times -= 1
                return fault
        return None

    async def _search(self, http: web.Request) -> web.Response:
        """Of the real hub's answer what exo reads."""
        words = http.query.get("search", "").lower()
        repos = sorted(repo for repo in self.repos if words in repo.lower())
        found = [
            {
                "id": repo,
                "downloads": 1234,
                "tags": ["safetensors"],
                "safetensors": {"parameters": {"F32": 1000}, "total": 1000},
            }
            for repo in repos
        ]
        return web.json_response(found)

    async def _info(self, http: web.Request) -> web.Response:
        _, commit, files = self._find(http)
        if (fault := self._fault("api")) is not None:
            return web.Response(status=fault.status, headers=fault.headers)
        siblings = [{"rfilename": path} for path in files]
        return web.json_response(
            {"id": http.match_info["repo"], "sha": commit, "siblings": siblings}
        )

    async def _tree(self, http: web.Request) -> web.Response:
        _, _, files = self._find(http)
        entries = []
        for path, data in files.items():
            entry = {"type": "file", "path": path, "size": len(data), "oid": self._git[id(data)]}
            if is_large(path):
                sha = self._digests[id(data)]
                entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 134}
            entries.append(entry)
        return web.json_response(entries)

    async def _resolve(self, http: web.Request) -> web.StreamResponse:
        _, commit, files = self._find(http)
        path = http.match_info["path"]
        if path not in files:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        data = files[path]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_large(path):
            sha = self._digests[id(data)]
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data))}
            raise web.HTTPFound(f"{self.cdn}/cdn/{sha}", headers=headers)
        headers["ETag"] = f'W/"{self._git[id(data)]}-gzip"'
        return await self._send(http, path, data, headers)

    async def _large(self, http: web.Request) -> web.StreamResponse:
        path, data = self._blobs[http.match_info["sha"]]
        return await self._send(http, path, data, {})

    async def _send(
        self, http: web.Request, path: str, data: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        fault = None if http.method == "HEAD" else self._fault(path)
        if fault is not None and fault.kind == "status":
            return web.Response(status=fault.status, headers=fault.headers)
        start, end, status = 0, len(data), 200
        asked = http.http_range
        if self.ranges and asked.start is not None:
            start, end, status = asked.start, min(asked.stop or len(data), len(data)), 206
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        headers = headers | {"Content-Length": str(end - start)}
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(http)
        if http.method == "HEAD":
            return response
        piece = 1 << 18
        for at in range(start, end, piece):
            chunk = data[at : min(at + piece, end)]
            if fault is not None and at - start + len(chunk) > fault.after:
                chunk = await self._misbehave(http, fault, chunk, fault.after - (at - start))
            try:
                await response.write(chunk)
            except ConnectionResetError:
                return response  # the client has gone away
            self.sent[path] += len(chunk)
            if self.rate:
                await asyncio.sleep(len(chunk) / self.rate)
        await response.write_eof()
        return response

    async def _misbehave(self, http: web.Request, fault: Fault, chunk: bytes, good: int) -> bytes:
        if fault.kind == "wrong":
            return bytes(byte ^ 0xFF for byte in chunk[:1024]) + chunk[1024:]
        assert http.transport is not None
        if fault.kind == "stall":
            while not http.transport.is_closing():
                await asyncio.sleep(0.05)
        http.transport.abort()
        raise ConnectionResetError("as commanded")
