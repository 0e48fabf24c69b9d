"""LlamaIndex's OpenAILike: complete, chat, stream."""
# needs: llama-index-llms-openai-like==0.8.1

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = os.environ["EXO_URL"], os.environ["EXO_MODEL"]
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=8,
    temperature=0.0,
)
text = llm.chat([ChatMessage(role="user", content="hello")]).message.content
parts = [part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="hello")])]
assert "".join(parts) == text
print(json.dumps([text, llm.complete("hello").text]))
