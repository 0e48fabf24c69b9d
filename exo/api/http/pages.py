"""The pages that a browser opens, and the files that they are made of."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from aiohttp import web

from exo.api.http.routes import Handler

FOR_GOOD = "public, max-age=31536000, immutable"
ASK_FIRST = "no-cache"


class Pages:
    """The files of a folder under a prefix.

    Pages are given out with a digest of all the folder's files in the addresses of what they load:
    a browser keeps that for good, and after an update has all of it anew, never a module of before
    beside one of now.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix

    def page(self, name: str, headers: dict[str, str] | None = None) -> Handler:
        async def show(http: web.Request) -> web.Response:
            text = (self._folder / name).read_text(encoding="utf-8")
            versioned = f'"{self._prefix}{_version(self._files())}/'
            return web.Response(
                text=text.replace(f'"{self._prefix}', versioned),
                content_type="text/html",
                headers={"Cache-Control": ASK_FIRST, **(headers or {})},
            )

        return show

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(self._prefix + "{version:[0-9a-f]{16}}/{name:.+}", self._file)
        app.router.add_get(self._prefix + "{name:.+}", self._file)

    async def _file(self, http: web.Request) -> web.FileResponse:
        files, version = self._files(), http.match_info.get("version")
        file = files.get(http.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        # Who asks for another version gets what there is, but not for good.
        is_current = version is not None and version == _version(files)
        headers = {"Cache-Control": FOR_GOOD if is_current else ASK_FIRST}
        return web.FileResponse(file, headers=headers)

    def _files(self) -> dict[str, Path]:
        return {
            file.relative_to(self._folder).as_posix(): file
            for file in sorted(self._folder.rglob("*"))
            if file.is_file()
        }


def _version(files: dict[str, Path]) -> str:
    """Of what is there now: in a checkout the files change while a node runs."""
    return _digest(tuple((name, file, file.stat().st_mtime_ns) for name, file in files.items()))


@functools.lru_cache(maxsize=4)
def _digest(files: tuple[tuple[str, Path, int], ...]) -> str:
    whole = hashlib.sha256()
    for name, file, _ in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{name} {content}\n".encode())
    return whole.hexdigest()[:16]
