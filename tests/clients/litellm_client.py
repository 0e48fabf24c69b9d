"""LiteLLM: all three dialects, streamed and whole, a tool."""
# needs: litellm==1.110.2 mcp

import json
import os

import litellm

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
HELLO = [{"role": "user", "content": "hello"}]
WAYS = (
    {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
    {"model": f"ollama_chat/{MODEL}", "api_base": URL},
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}

told = []
for way in WAYS:
    whole = litellm.completion(**way, messages=HELLO, max_tokens=8, temperature=0)
    text = whole.choices[0].message.content
    stream = litellm.completion(**way, messages=HELLO, max_tokens=8, temperature=0, stream=True)
    parts = "".join(part.choices[0].delta.content or "" for part in stream)
    assert parts == text, (way, parts, text)
    told.append(text)
for way in WAYS[:2]:
    called = litellm.completion(
        **way,
        messages=HELLO,
        max_tokens=200,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = called.choices[0].message.tool_calls
    told.append(json.loads(call.function.arguments))
vectors = litellm.embedding(
    model=f"openai/{MODEL}",
    input=["hello"],
    api_base=f"{URL}/v1",
    api_key="none",
    encoding_format="float",
)
told.append(len(vectors.data[0]["embedding"]))
print(json.dumps(told))
