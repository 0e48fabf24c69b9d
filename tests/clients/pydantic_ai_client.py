"""Pydantic AI: a typed result, by a tool and by a schema; a text that streams."""
# needs: pydantic-ai-slim[openai]==2.68.0

import asyncio
import json
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]


class Place(BaseModel):
    city: Literal["Bern", "Rome"]
    days: Literal[1, 2, 3]


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    settings = {"max_tokens": 300, "temperature": 0.0, "parallel_tool_calls": False}
    by_tool = await Agent(model, output_type=Place, model_settings=settings).run("hello")
    native = Agent(model, output_type=NativeOutput(Place), model_settings=settings)
    by_schema = await native.run("hello")
    async with Agent(model, model_settings={"max_tokens": 8}).run_stream("hello") as stream:
        text = await stream.get_output()
    print(json.dumps([by_tool.output.model_dump(), by_schema.output.model_dump(), text]))


asyncio.run(main())
