"""OpenAI's Responses: created, streamed, kept for a while.

Format: https://platform.openai.com/docs/api-reference/responses, .../responses-streaming
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects.openai_request import made_call
from exo.api.dialects.responses_tools import Offered, call_of, custom_input, offered_tools
from exo.api.dialects.responses_types import ResponsesBody, response_request
from exo.api.http.bodies import read_body
from exo.api.http.errors import openai_error
from exo.api.http.routes import Route
from exo.api.http.streaming import EVENTS, Waiting, streamed
from exo.api.request import ChatDefaults, ChatRequest, Message
from exo.download.progress import OnProgress, unheard
from exo.errors import ExoError, InvalidRequest, ModelNotFound
from exo.models.card import resolve
from exo.models.markup.reader import CallArguments, CallBegun, Part, Said
from exo.models.markup.tools import arguments_of
from exo.orchestration.node import StandardNode

KEPT = 256
KEPT_S = 3600.0
"""So many responses are kept, for so long: they can be gone on from and read again."""


@dataclass(frozen=True)
class _Kept:
    response: dict[str, Any]
    conversation: list[Message]
    at: float


class OpenAIResponses:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def routes(self) -> list[Route]:
        path, one = "/v1/responses", "/v1/responses/{response_id:(?!input_tokens$)[^/]+}"
        summary = "An answer, as items"
        return [
            Route("POST", path, self.create, summary, ResponsesBody, streams=EVENTS),
            Route("POST", f"{path}/input_tokens", self.count, "Tokens of a prompt", ResponsesBody),
            Route("GET", one, self.retrieve, "A response that is kept"),
            Route("DELETE", one, self.delete, "Forget a response"),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, ResponsesBody)
        offered = offered_tools(body.tools or ())
        request, conversation = self._request(body, offered)
        if body.stream:
            waiting = Waiting(request.model)
            told = _Told()
            events = self._events(body, request, offered, conversation, told, waiting.note)
            return await streamed(http, events, EVENTS, waiting.comment, told.failed)
        answer = await self._chat.answer(request, unheard)
        items = _Items(answer, offered)
        pieces = []
        async with contextlib.aclosing(answer.pieces) as coming:
            async for _, piece in coming:
                pieces.append(piece)
                for part in piece.parts:
                    items.take(part)
        items.end()
        response = _response(body, answer, items, pieces)
        self._keep(body, response, conversation, items)
        return web.json_response(response)

    async def count(self, http: web.Request) -> web.Response:
        body = await read_body(http, ResponsesBody)
        request, _ = self._request(body, offered_tools(body.tools or ()))
        tokens = await self._chat.count_tokens(request, unheard)
        return web.json_response({"object": "response.input_tokens", "input_tokens": tokens})

    def _request(
        self, body: ResponsesBody, offered: Mapping[str, Offered]
    ) -> tuple[ChatRequest, list[Message]]:
        """Of a model that is known, after the response that the body names."""
        before: list[Message] = []
        if body.previous_response_id is not None:
            before = self._find(body.previous_response_id, "previous_response_id").conversation
        request, conversation = response_request(body, before, offered, self._defaults)
        resolve(request.model)
        return request, conversation

    async def retrieve(self, http: web.Request) -> web.Response:
        return web.json_response(self._find(http.match_info["response_id"], None).response)

    async def delete(self, http: web.Request) -> web.Response:
        response_id = http.match_info["response_id"]
        self._find(response_id, None)
        del self._kept[response_id]
        return web.json_response({"id": response_id, "object": "response", "deleted": True})

    def _find(self, response_id: str, param: str | None) -> _Kept:
        kept = self._kept.get(response_id)
        if kept is None or time.monotonic() - kept.at > KEPT_S:
            said = f"there is no response {response_id}: {KEPT} are kept, for an hour, by the node "
            said += "that gave them"
            raise InvalidRequest(said, param=param) if param else ModelNotFound(said)
        return kept

    def _keep(
        self,
        body: ResponsesBody,
        response: dict[str, Any],
        conversation: list[Message],
        items: _Items,
    ) -> None:
        if body.store is False:
            return
        whole = [*conversation, items.message()]
        self._kept[response["id"]] = _Kept(response, whole, time.monotonic())
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    async def _events(
        self,
        body: ResponsesBody,
        request: ChatRequest,
        offered: Mapping[str, Offered],
        conversation: list[Message],
        told: _Told,
        on_progress: OnProgress,
    ) -> AsyncGenerator[bytes, None]:
        answer = await self._chat.answer(request, on_progress)
        items, event = _Items(answer, offered), told.event
        pieces: list[Piece] = []
        async with contextlib.aclosing(answer.pieces) as coming:
            async for _, piece in coming:
                if not pieces:  # what fails before the first token fails with a real status
                    begun = told.response = _response(body, answer, items, [])
                    yield event("response.created", {"response": begun})
                    yield event("response.in_progress", {"response": begun})
                pieces.append(piece)
                for part in piece.parts:
                    for kind, data in items.take(part):
                        yield event(kind, data)
        for kind, data in items.end():
            yield event(kind, data)
        response = _response(body, answer, items, pieces)
        self._keep(body, response, conversation, items)
        yield event(f"response.{response['status']}", {"response": response})


class _Told:
    """A stream's events, numbered, and the response that it is of."""

    def __init__(self) -> None:
        self.response: dict[str, Any] = {"id": "", "object": "response", "output": []}
        self._number = -1

    def event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._number += 1
        whole = {"type": kind, "sequence_number": self._number, **data}
        return f"event: {kind}\ndata: {json.dumps(whole, ensure_ascii=False)}\n\n".encode()

    def failed(self, error: ExoError) -> bytes:
        """Both that OpenAI sends: its clients raise the first, Codex waits for the second."""
        said = openai_error(error)["error"]
        why = {"code": "server_error", "message": said["message"]}
        response = self.response | {"status": "failed", "error": why}
        return self.event("error", {**said, "type": "error"}) + self.event(
            "response.failed", {"response": response}
        )


Event = tuple[str, dict[str, Any]]


_MESSAGE = {"type": "message", "role": "assistant", "content": []}
_THOUGHTS = {"type": "reasoning", "summary": [], "content": []}


class _Items:
    """An answer's parts as output items, and the events that tell of each."""

    def __init__(self, answer: Answer, offered: Mapping[str, Offered]) -> None:
        self._answer = answer
        self._offered = offered
        self.done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._calls = 0

    def take(self, part: Part) -> list[Event]:
        if isinstance(part, CallBegun):
            call_id = self._answer.call_id(0, self._calls)
            self._calls += 1
            item = self._offered[part.name].begun(call_id)
            return self._begin(item, "ctc" if item["type"] == "custom_tool_call" else "fc")
        if isinstance(part, CallArguments):
            self._text += part.text
            if self._is("custom_tool_call"):
                return []  # what it is called with is told whole
            return [self._event("function_call_arguments.delta", {"delta": part.text})]
        if isinstance(part, Said):
            begun = self._needs(_MESSAGE, "msg")
            self._text += part.text
            at = {"content_index": 0, "delta": part.text, "logprobs": []}
            return [*begun, self._event("output_text.delta", at)]
        begun = self._needs(_THOUGHTS, "rs")
        self._text += part.text
        at = {"content_index": 0, "delta": part.text}
        return [*begun, self._event("reasoning_text.delta", at)]

    def end(self) -> list[Event]:
        """The answer is over; it has at least one item."""
        begun: list[Event] = []
        if self._item is None and not self.done:
            begun = self._begin(_MESSAGE, "msg")
        return [*begun, *self._finish()]

    def message(self) -> Message:
        """All of it as one message of the assistant's."""
        found: Message = {"role": "assistant", "content": ""}
        for item in self.done:
            if item["type"] == "message":
                found["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                found["reasoning_content"] = item["content"][0]["text"]
            else:
                name, arguments = call_of(item, "output")
                call = made_call("output", item["call_id"], name, arguments_of(arguments))
                found.setdefault("tool_calls", []).append(call)
        return found

    def _is(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _needs(self, item: Mapping[str, Any], prefix: str) -> list[Event]:
        return [] if self._is(item["type"]) else self._begin(item, prefix)

    def _begin(self, item: Mapping[str, Any], prefix: str) -> list[Event]:
        events = self._finish()
        name = f"{prefix}_{self._answer.id}{len(self.done)}"
        self._item = {**item, "id": name, "status": "in_progress"}
        self._text = ""
        added = {"output_index": len(self.done), "item": dict(self._item)}
        events.append(("response.output_item.added", added))
        if (part := self._part("")) is not None:
            events.append(self._event("content_part.added", {"content_index": 0, "part": part}))
        return events

    def _finish(self) -> list[Event]:
        if self._item is None:
            return []
        item, part = self._item, self._part(self._text)
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = self._text
            done = {"arguments": self._text, "name": item["name"]}
            events.append(self._event("function_call_arguments.done", done))
        elif item["type"] == "custom_tool_call":
            item["input"] = said = custom_input(self._text)
            events.append(self._event("custom_tool_call_input.delta", {"delta": said}))
            events.append(self._event("custom_tool_call_input.done", {"input": said}))
        else:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done = {"content_index": 0, "text": self._text}
            done |= {"logprobs": []} if kind == "output_text" else {}
            events.append(self._event(f"{kind}.done", done))
            events.append(self._event("content_part.done", {"content_index": 0, "part": part}))
            item["content"] = [part]
        item["status"] = "completed"
        events.append(
            ("response.output_item.done", {"output_index": len(self.done), "item": dict(item)})
        )
        self.done.append(item)
        self._item = None
        return events

    def _part(self, text: str) -> dict[str, Any] | None:
        assert self._item is not None
        if self._item["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return None

    def _event(self, kind: str, data: dict[str, Any]) -> Event:
        assert self._item is not None
        at = {"item_id": self._item["id"], "output_index": len(self.done)}
        return f"response.{kind}", at | data


def _response(
    body: ResponsesBody, answer: Answer, items: _Items, pieces: list[Piece]
) -> dict[str, Any]:
    """As it is now: in progress before the first piece."""
    reason = pieces[-1].finish_reason if pieces else None
    status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
    output_tokens = sum(len(piece.tokens) for piece in pieces)
    thought = sum(len(piece.tokens) for piece in pieces if piece.thought and not piece.text)
    usage = {
        "input_tokens": len(answer.prompt),
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": len(answer.prompt) + output_tokens,
    }
    said = msgspec.to_builtins
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": ({"reason": "max_output_tokens"} if status == "incomplete" else None),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": list(items.done) if pieces else [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": said(body.text) if body.text else {"format": {"type": "text"}},
        "tool_choice": said(body.tool_choice) if body.tool_choice else "auto",
        "tools": said(body.tools) if body.tools else [],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": usage if reason else None,
        "user": body.user,
    }
