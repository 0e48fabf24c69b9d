"""The vendors' own clients, as people have them, against a node and a ring of two."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import vendors
from cluster import ExoProcess, cluster
from hub_server import HubServer
from repositories import shaped


@pytest.fixture(params=[1, 2], ids=["alone", "ring"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ExoProcess]:
    async with cluster(tmp_path) as c:
        for i in range(request.param):
            c.add(f"n{i}", "--memory", "1GB")
        await c.together()
        yield c.nodes["n0"]


def openais(node: ExoProcess) -> vendors.openai.AsyncOpenAI:
    return vendors.openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)


def anthropics(node: ExoProcess) -> vendors.anthropic.AsyncAnthropic:
    return vendors.anthropic.AsyncAnthropic(base_url=node.url, api_key="none", max_retries=0)


def ollamas(node: ExoProcess) -> vendors.ollama.AsyncClient:
    return vendors.ollama.AsyncClient(host=node.url)


HELLO = [{"role": "user", "content": "hello"}]


async def test_several_answers_are_those_of_their_seeds(node: ExoProcess) -> None:
    bias = {str(97 + i): 5 for i in range(26)}
    how = {"model": "dummy", "messages": HELLO, "max_tokens": 24, "temperature": 2}
    async with openais(node) as ai:
        three = await ai.chat.completions.create(**how, n=3, seed=5, logit_bias=bias)
        texts = [choice.message.content for choice in three.choices]
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert len(set(texts)) > 1 and three.usage.completion_tokens == 72
        for i, text in enumerate(texts):
            one = await ai.chat.completions.create(**how, seed=5 + i, logit_bias=bias)
            assert one.choices[0].message.content == text
        stream = await ai.chat.completions.create(
            **how, n=3, seed=5, logit_bias=bias, stream=True, stream_options={"include_usage": True}
        )
        parts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
        assert parts == texts and usage == three.usage


async def test_a_final_message_is_gone_on_with(node: ExoProcess) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once"}]
    async with openais(node) as ai:
        went_on = await ai.chat.completions.create(
            model="dummy",
            messages=begun,
            max_tokens=4,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        raw = await ai.completions.create(
            model="dummy",
            prompt=[*b"user: hello\nassistant: Once"],
            max_tokens=4,
            temperature=0,
        )
        assert went_on.choices[0].message.content == raw.choices[0].text


async def test_completions(node: ExoProcess) -> None:
    how = {"model": "dummy", "max_tokens": 6, "temperature": 0}
    async with openais(node) as ai:
        two = await ai.completions.create(**how, prompt=["Once", "upon"], logprobs=2, n=2)
        assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
        assert two.choices[0].text == two.choices[1].text != two.choices[2].text
        assert "".join(two.choices[0].logprobs.tokens) == two.choices[0].text
        assert len(two.choices[0].logprobs.top_logprobs[0]) == 2
        by_id = await ai.completions.create(**how, prompt=[*b"Once"], echo=True)
        assert by_id.choices[0].text == "Once" + two.choices[0].text
        stream = await ai.completions.create(**how, prompt=["Once", "upon"], stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [two.choices[0].text, two.choices[2].text]
        with pytest.raises(
            vendors.openai.BadRequestError, match="token 70000 is none of this model's"
        ):
            await ai.completions.create(**how, prompt=[70000])


@functools.cache
def person() -> type:
    class Person(vendors.pydantic.BaseModel):
        name: str = vendors.pydantic.Field(max_length=6)
        age: int = vendors.pydantic.Field(ge=0, le=99)

    return Person


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
}
FUNCTION = {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}


async def test_answers_follow_schemas(node: ExoProcess) -> None:
    how = {"model": "dummy", "messages": HELLO, "max_tokens": 200}
    async with openais(node) as ai:
        parsed = await ai.chat.completions.parse(**how, response_format=person(), n=2)
        assert all(choice.finish_reason == "stop" for choice in parsed.choices)
        assert isinstance(parsed.choices[1].message.parsed, person())
        for extra, pattern in (
            ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
            ({"guided_choice": ["yes", "no"]}, "yes|no"),
            ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ):
            told = await ai.chat.completions.create(**how, extra_body=extra)
            assert re.fullmatch(pattern, told.choices[0].message.content)
        wizard = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}
        with pytest.raises(vendors.openai.BadRequestError, match="wizard"):
            await ai.chat.completions.create(**how, response_format=wizard)
        # A constrained answer beside free ones changes nothing for them.
        free = await ai.chat.completions.create(**how | {"max_tokens": 30}, temperature=0)
        beside = await asyncio.gather(
            ai.chat.completions.create(**how | {"max_tokens": 30}, temperature=0),
            ai.chat.completions.create(**how, extra_body={"guided_regex": "[a-z]{90}"}),
        )
        assert beside[0].choices[0].message.content == free.choices[0].message.content


async def test_openais_tools(node: ExoProcess) -> None:
    how = {"model": "dummy", "messages": HELLO, "max_tokens": 300, "tools": [TOOL]}
    how |= {"temperature": 0, "parallel_tool_calls": False, "tool_choice": "required"}
    async with openais(node) as ai:
        whole = await ai.chat.completions.create(**how)
        choice = whole.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert 1 <= json.loads(call.function.arguments)["days"] <= 3
        async with ai.chat.completions.stream(**how) as stream:
            async for event in stream:
                assert event.type != "content.delta" or not event.delta
            final = await stream.get_final_completion()
        streamed = final.choices[0].message.tool_calls[0]
        assert streamed.function.arguments == call.function.arguments
        # The loop goes on with the result.
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        more = [*HELLO, choice.message.model_dump(exclude_none=True), result]
        after = how | {"messages": more, "tool_choice": "auto", "max_tokens": 5}
        assert (await ai.chat.completions.create(**after)).choices[0].message.content
        named = how | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        assert (await ai.chat.completions.create(**named)).choices[0].message.tool_calls
        nobody = {"type": "function", "function": {"name": "nobody"}}
        with pytest.raises(vendors.openai.BadRequestError, match="nobody"):
            await ai.chat.completions.create(**how | {"tool_choice": nobody})


async def test_openais_responses(node: ExoProcess) -> None:
    how = {"model": "dummy", "max_output_tokens": 300}
    tool = {"type": "function", "strict": True, **FUNCTION}
    async with openais(node) as ai:
        first = await ai.responses.create(**how | {"max_output_tokens": 8}, input="hello")
        assert (first.status, first.usage.output_tokens) == ("incomplete", 8)
        assert first.incomplete_details.reason == "max_output_tokens"
        second = await ai.responses.create(
            **how | {"max_output_tokens": 8}, input="more", previous_response_id=first.id
        )
        assert second.usage.input_tokens > first.usage.input_tokens + len(first.output_text)
        assert (await ai.responses.retrieve(second.id)).output_text == second.output_text
        await ai.responses.delete(second.id)
        with pytest.raises(vendors.openai.NotFoundError):
            await ai.responses.retrieve(second.id)
        counted = await ai.responses.input_tokens.count(model="dummy", input="hello")
        assert counted.input_tokens == first.usage.input_tokens
        parsed = await ai.responses.parse(**how, input="hello", text_format=person())
        assert isinstance(parsed.output_parsed, person())
        calls = how | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        numbers, kinds = [], []
        async with ai.responses.stream(**calls, input="hello") as stream:
            async for event in stream:
                numbers.append(event.sequence_number)
                kinds.append(event.type)
            final = await stream.get_final_response()
        assert numbers == [*range(len(numbers))]
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert kinds[-1] == "response.completed"
        (call,) = final.output
        assert call.name == "get_weather" and json.loads(call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        asked = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), result]
        went_on = await ai.responses.create(**how | {"max_output_tokens": 5}, input=asked)
        assert went_on.output_text
        custom = {"type": "custom", "name": "apply_patch"}
        calls["tools"] = [
            {"type": "namespace", "name": "files", "description": "", "tools": [custom]}
        ]
        events = [e async for e in await ai.responses.create(**calls, input="hello", stream=True)]
        said = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        (call,) = events[-1].response.output
        assert (call.type, call.name, call.namespace) == (
            "custom_tool_call",
            "apply_patch",
            "files",
        )
        assert call.input and call.input == "".join(said)
        with pytest.raises(vendors.openai.BadRequestError, match="background"):
            await ai.responses.create(**how, input="hello", background=True)


async def test_openais_embeddings(node: ExoProcess) -> None:
    async with openais(node) as ai:
        several = await ai.embeddings.create(model="dummy", input=["one", "two" * 100])
        for one in several.data:
            assert sum(x * x for x in one.embedding) == pytest.approx(1)
        plain = await ai.embeddings.create(model="dummy", input="one", encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(several.data[0].embedding)
        assert several.usage.prompt_tokens == 303
        cut = await ai.embeddings.create(model="dummy", input="one", dimensions=2)
        assert len(cut.data[0].embedding) == 2
        with pytest.raises(vendors.openai.BadRequestError, match="dimensions"):
            await ai.embeddings.create(model="dummy", input="one", dimensions=99)
        with pytest.raises(vendors.openai.BadRequestError, match="input"):
            await ai.embeddings.create(model="dummy", input=["x" * 5000])
    async with ollamas(node) as other:
        theirs = await other.embed("dummy", ["one"])
        assert list(theirs.embeddings[0]) == pytest.approx(plain.data[0].embedding)


async def test_anthropics_tools(node: ExoProcess) -> None:
    tool = {"name": "get_weather", "description": "Of a city", "input_schema": WEATHER}
    how = {"model": "dummy", "max_tokens": 300, "messages": HELLO, "tools": [tool]}
    how["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    async with anthropics(node) as ai:
        whole = await ai.messages.create(**how)
        (used,) = whole.content
        assert whole.stop_reason == "tool_use" and 1 <= used.input["days"] <= 3
        async with ai.messages.stream(**how) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
        assert final.content[0].input == used.input and final.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
        more = [
            *HELLO,
            {"role": "assistant", "content": [used.model_dump(exclude_none=True)]},
            {"role": "user", "content": [result]},
        ]
        after = how | {"messages": more, "tool_choice": {"type": "auto"}, "max_tokens": 5}
        assert (await ai.messages.create(**after)).content[0].type == "text"


async def test_ollamas_formats_and_tools(node: ExoProcess) -> None:
    async with ollamas(node) as ai:
        options = {"num_predict": 200, "temperature": 0}
        schema = person().model_json_schema()
        told = await ai.chat("dummy", HELLO, format=schema, options=options)
        person().model_validate_json(told.message.content)
        call = {"function": {"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}}
        more = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        ]
        after = await ai.chat("dummy", more, tools=[TOOL], options=options | {"num_predict": 5})
        assert after.message.content


async def test_anthropics_client(node: ExoProcess) -> None:
    how = {"model": "dummy", "max_tokens": 8, "messages": HELLO}
    async with anthropics(node) as ai:
        whole = await ai.messages.create(**how, system="Be brief.")
        assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
        kinds = []
        async with ai.messages.stream(**how, system="Be brief.") as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_message()
        assert final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)
        prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        assert final.usage.input_tokens == 1, "the prompt was computed for the first answer"
        assert final.usage.cache_read_input_tokens == prompt - 1
        raw = [kind for kind in kinds if kind != "text"]
        assert raw[:2] == ["message_start", "content_block_start"]
        assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        text = whole.content[0].text
        stopped = await ai.messages.create(**how, system="Be brief.", stop_sequences=[text[3:5]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
        assert stopped.content[0].text == text[: text.index(text[3:5])]
        counted = await ai.messages.count_tokens(model="dummy", messages=HELLO, system="Be brief.")
        assert counted.input_tokens == prompt
        search = {"type": "web_search_20250305", "name": "web_search"}
        with pytest.raises(vendors.anthropic.BadRequestError, match="web_search"):
            await ai.messages.create(**how, tools=[search])
        with pytest.raises(vendors.anthropic.NotFoundError, match="unknown model"):
            await ai.messages.create(**how | {"model": "nothing like it"})


async def test_ollamas_client(node: ExoProcess) -> None:
    async with ollamas(node) as ai:
        options = {"num_predict": 8, "temperature": 0}
        whole = await ai.chat("dummy", HELLO, options=options)
        assert whole.done and whole.done_reason == "length" and whole.eval_count == 8
        text = ""
        async for part in await ai.chat("dummy:latest", HELLO, options=options, stream=True):
            text += part.message.content or ""
        assert text == whole.message.content and part.done and part.prompt_eval_count > 0
        said = await ai.generate("dummy", "hello", options=options)
        assert said.response == text
        raw = await ai.generate("dummy", "Once", raw=True, options=options)
        assert raw.response != text and raw.prompt_eval_count == 4
        assert (await ai.generate("dummy", "")).done_reason == "load"
        assert "dummy" in [model.model for model in (await ai.ps()).models]
        shown = await ai.show("dummy")
        assert "completion" in shown.capabilities
        assert isinstance((await ai.list()).models, list)
        with pytest.raises(vendors.ollama.ResponseError, match="unknown model"):
            await ai.chat("nothing like it", HELLO)
        assert (await ai.generate("dummy", "", keep_alive=0)).done_reason == "unload"
        assert (await node.get("/health"))["ready"] == []
        assert (await ai.chat("dummy", HELLO, options=options)).message.content == text
        with pytest.raises(vendors.ollama.ResponseError, match="not supported by exo"):
            await ai.copy("dummy", "another")


async def test_ollamas_client_pulls_and_deletes(tmp_path: Path) -> None:
    with HubServer() as server:
        server.put("org/tiny", shaped("someone/odd_Names.v1", tmp_path / "made").files)
        async with cluster(tmp_path) as c:
            node = c.add_with_cache("a", server.url)
            await c.together()
            server.rate = 2e6
            async with ollamas(node) as ai:
                parts = [part async for part in await ai.pull("org/tiny", stream=True)]
                assert parts[0].status == "pulling manifest" and parts[-1].status == "success"
                assert any(part.total and part.completed for part in parts)
                assert "org/tiny" in [model.model for model in (await ai.list()).models]
                assert (await ai.delete("org/tiny")).status == "success"
                with pytest.raises(vendors.ollama.ResponseError, match="org/no"):
                    await ai.pull("org/no")
