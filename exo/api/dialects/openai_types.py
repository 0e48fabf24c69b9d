"""The bodies of OpenAI's chat completions, as clients send them.

Format: https://platform.openai.com/docs/api-reference/chat, with the fields that vLLM, llama.cpp
and SGLang added.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from exo.api.dialects.sampling_fields import Limit, SamplingFields, TopLogprobs
from exo.api.request import MAX_CHOICES

Json = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


# Content --------------------------------------------------------------------------------------


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: Any = None


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: Any = None


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    video_url: Any = None


class FilePart(msgspec.Struct, tag_field="type", tag="file"):
    file: Any = None


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart
Content = str | list[ContentPart]


# Messages -------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | Json = "{}"  # an object where clients wrote for Ollama


class CallMade(msgspec.Struct):
    """A call in a message of the assistant's."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class SystemMessage(msgspec.Struct, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[CallMade] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: Any = None
    annotations: Any = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str = ""
    name: str | None = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function"):
    name: str
    content: Content | None = None


ChatMessage = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


# Tools ----------------------------------------------------------------------------------------


class Function(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    function: Function


class CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    custom: Any = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoiceField = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


# Formats --------------------------------------------------------------------------------------


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    schema: Json | None = None  # llama.cpp's


class NamedSchema(msgspec.Struct):
    name: str = ""
    description: str | None = None
    schema: Json | bool | None = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class RegexFormat(msgspec.Struct, tag_field="type", tag="regex"):
    pattern: str


class GrammarFormat(msgspec.Struct, tag_field="type", tag="grammar"):
    grammar: str


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's; one of them."""

    json: Json | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(msgspec.Struct):
    """What the answer may be like: a hint, of which nothing is made as yet."""

    type: Literal["content"]
    content: Content


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerationFields(SamplingFields, kw_only=True):
    """What chat completions and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Limit | None = None
    n_predict: Limit | None = None  # llama.cpp's name for it
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Json | None = None  # llama.cpp's and SGLang's
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # What clients are known to send along and what changes nothing here.
    service_tier: Any = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None
    timings_per_token: Any = None
    id_slot: Any = None
    reasoning_format: Any = None
    add_special_tokens: Any = None
    spaces_between_special_tokens: Any = None


class ChatBody(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[FunctionTool | CustomTool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Effort | None = None
    max_reasoning_tokens: Annotated[int, Meta(ge=0)] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    return_progress: bool | None = None  # llama.cpp's
    prediction: Prediction | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Any = None
