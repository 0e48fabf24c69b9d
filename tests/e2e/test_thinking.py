"""A model that thinks before it answers: real tokens, a real template, random weights. Its thoughts
are closed at their budget and what follows is held to a format, so it plays its part."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import pytest
import vendors
from cluster import ExoProcess, cluster
from thinker import write_thinker

HELLO = [{"role": "user", "content": "hello"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(params=[1, 2], ids=["alone", "ring"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ExoProcess]:
    async with cluster(tmp_path) as c:
        for i in range(request.param):
            c.add(f"n{i}", "--memory", "1GB", "--threads", "1", engine="cpu")
        await c.together()
        yield c.nodes["n0"]


async def test_thoughts_come_apart_in_every_dialect(node: ExoProcess, thinker: Path) -> None:
    model = str(thinker)
    ai = vendors.openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    how: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200, "temperature": 0}
    budget = {"extra_body": {"max_reasoning_tokens": 12}}
    whole = await ai.chat.completions.create(**how, response_format=form, **budget)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "stop"
    assert json.loads(message.content)["city"] in ("Bern", "Rome")
    assert message.reasoning_content and "think>" not in message.reasoning_content

    stream = await ai.chat.completions.create(**how, response_format=form, **budget, stream=True)
    thought, said = "", ""
    async for chunk in stream:
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thought, said) == (message.reasoning_content, message.content)

    no_thought = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    plain = await ai.chat.completions.create(**how, response_format=form, **no_thought)
    assert not getattr(plain.choices[0].message, "reasoning_content", None)
    assert json.loads(plain.choices[0].message.content)

    tool = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
    called = await ai.chat.completions.create(
        **how, **budget, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] and called.choices[0].message.content is None
    assert called.choices[0].message.reasoning_content

    anthropic = vendors.anthropic.AsyncAnthropic
    async with anthropic(base_url=node.url, api_key="x", max_retries=0) as other:
        thinking = {"type": "enabled", "budget_tokens": 12}
        output = {"format": {"type": "json_schema", "schema": PLACE}}
        asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200}
        asked |= {"thinking": thinking, "extra_body": {"output_config": output}}
        told = await other.messages.create(**asked)
        assert [block.type for block in told.content] == ["thinking", "text"]
        assert told.content[1].text == message.content
        async with other.messages.stream(**asked) as events:
            final = await events.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].thinking == told.content[0].thinking

    async with ollama.AsyncClient(host=node.url) as third:
        options = {"num_predict": 200, "temperature": 0}
        quiet = await third.chat(model, HELLO, think=False, format=PLACE, options=options)
        assert not quiet.message.thinking and json.loads(quiet.message.content)
        shown = await third.show(model)
        assert {"thinking", "tools"} <= set(shown.capabilities)
    await ai.close()
