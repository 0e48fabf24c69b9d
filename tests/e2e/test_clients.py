"""The vendors' own clients, as people have them, against a node and a ring of two."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import ollama
import openai
import pytest
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


def openais(node: ExoProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)


def anthropics(node: ExoProcess) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=node.url, api_key="none", max_retries=0)


def ollamas(node: ExoProcess) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=node.url)


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
        with pytest.raises(openai.BadRequestError, match="token 70000 is none of this model's"):
            await ai.completions.create(**how, prompt=[70000])


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
        assert final.usage.input_tokens == whole.usage.input_tokens
        raw = [kind for kind in kinds if kind != "text"]
        assert raw[:2] == ["message_start", "content_block_start"]
        assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        text = whole.content[0].text
        stopped = await ai.messages.create(**how, system="Be brief.", stop_sequences=[text[3:5]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
        assert stopped.content[0].text == text[: text.index(text[3:5])]
        counted = await ai.messages.count_tokens(model="dummy", messages=HELLO, system="Be brief.")
        assert counted.input_tokens == whole.usage.input_tokens
        search = {"type": "web_search_20250305", "name": "web_search"}
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await ai.messages.create(**how, tools=[search])
        with pytest.raises(anthropic.NotFoundError, match="unknown model"):
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
        with pytest.raises(ollama.ResponseError, match="unknown model"):
            await ai.chat("nothing like it", HELLO)
        with pytest.raises(ollama.ResponseError, match="not supported by exo"):
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
                with pytest.raises(ollama.ResponseError, match="org/no"):
                    await ai.pull("org/no")
