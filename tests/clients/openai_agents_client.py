"""OpenAI's Agents SDK: a tool is called, its result read, over Responses and over chat."""
# needs: openai-agents==0.24.0

import asyncio
import json
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
set_tracing_disabled(True)
called = []


@function_tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    told = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        settings = ModelSettings(
            tool_choice="required", max_tokens=120, temperature=0, parallel_tool_calls=False
        )
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(
            name="a",
            instructions="Help.",
            model=model,
            tools=[weather],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        result = await Runner.run(agent, "hello")
        told.append(result.final_output)
    assert len(called) == 2 and told == ["sunny", "sunny"]
    print(json.dumps([called, told]))


asyncio.run(main())
