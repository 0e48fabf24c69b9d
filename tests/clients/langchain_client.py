"""LangChain: chat, stream, with_structured_output, bind_tools and the loop of an agent."""
# needs: langchain-openai==1.7.4 langgraph==1.2.24

import json
import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]


class Place(BaseModel):
    city: Literal["Bern", "Rome"]
    days: Literal[1, 2, 3]


@tool
def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=200)
short = chat.bind(max_tokens=8)
text = short.invoke("hello").content
assert "".join(part.content for part in short.stream("hello")) == text
place = chat.with_structured_output(Place).invoke("hello")
by_tool = chat.with_structured_output(Place, method="function_calling").invoke("hello")
assert isinstance(place, Place) and isinstance(by_tool, Place)

messages = [HumanMessage("hello")]
calling = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
messages.append(calling.invoke(messages))
for call in messages[-1].tool_calls:
    messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
after = chat.bind_tools([weather]).bind(max_tokens=8).invoke(messages)
assert len(messages) == 3 and after.content
# An agent that goes on until it knows; what the model is to say is in agents.json.
agent = create_react_agent(chat, [weather])
steps = agent.invoke({"messages": [HumanMessage("langchain-task: how is it in Bern?")]})["messages"]
assert [step.type for step in steps] == ["human", "ai", "tool", "ai"]
assert steps[-1].content == "It is sunny in Bern."
embeddings = OpenAIEmbeddings(
    base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
)
vector = embeddings.embed_query("hello")
print(json.dumps([text, place.model_dump(), messages[1].tool_calls[0]["args"], len(vector)]))
