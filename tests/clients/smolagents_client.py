"""smolagents: its model class over exo with a tool, and an agent that calls one and answers."""
# needs: smolagents[openai]==1.26.0

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]


@tool
def weather(days: int) -> str:
    """The weather of some days.

    Args:
        days: how many
    """
    return f"sunny for {days} days"


model = OpenAIServerModel(
    model_id=MODEL, api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=200
)
hello = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
text = model.generate(hello, max_tokens=8).content
parts = "".join(part.content or "" for part in model.generate_stream(hello, max_tokens=8))
assert parts == text
said = model.generate(hello, tools_to_call_from=[weather], max_tokens=60)
# What the model is to say is in agents.json.
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
told = agent.run("smolagents-task: how will the weather be?")
assert told == "sunny for 3 days", told
print(json.dumps([text, told, [call.function.name for call in said.tool_calls or []]]))
