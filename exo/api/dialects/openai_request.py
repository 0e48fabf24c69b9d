"""From OpenAI's fields to the core's: messages, tools, formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exo import json_text
from exo.api.dialects import openai_types as types
from exo.api.dialects.sampling_fields import token_limit
from exo.api.request import ChatDefaults, ChatRequest, Message, Thinking
from exo.errors import InvalidRequest
from exo.models import grammar
from exo.models.markup.tools import Tool, ToolChoice


def chat_request(body: types.ChatBody, defaults: ChatDefaults) -> ChatRequest:
    """Raises InvalidRequest for what contradicts itself or is not served; `param` names it."""
    body.refuse(store=(False,), modalities=(["text"],), audio=(), web_search_options=())
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    messages = [_message(f"messages[{i}]", one) for i, one in enumerate(body.messages)]
    tools, choice = _tools(body)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = dict(body.chat_template_kwargs or {})
    return ChatRequest(
        model=defaults.model(body.model),
        prompt=defaults.introduced(messages),
        sampling=body.params(defaults, top_logprobs),
        asked=body.asked,
        max_tokens=token_limit(
            defaults.max_tokens,
            max_completion_tokens=body.max_completion_tokens,
            max_tokens=body.max_tokens,
            n_predict=body.n_predict,
        ),
        stop=body.stops,
        choices=body.n or 1,
        continues=_continues(body, messages),
        user=body.user or "",
        tools=tools,
        tool_choice=choice,
        grammar=format_grammar(body),
        thinking=_thinking(body, options),
        template=options,
        ends=frozenset(body.stop_token_ids or ()),
        ignores_end=bool(body.ignore_eos),
        shortcuts=body.cache_prompt is not False,
        truncates=body.truncation == "auto",
        shows_special=body.skip_special_tokens is False,
    )


def _continues(body: types.ChatBody, messages: list[Message]) -> bool:
    """vLLM's pair of flags: whether the last message is gone on with."""
    goes_on = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    begins = not goes_on if begins is None else begins
    if goes_on and begins:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if not begins and not goes_on:
        raise InvalidRequest(
            "add_generation_prompt=false needs continue_final_message=true",
            param="add_generation_prompt",
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant's",
            param="continue_final_message",
        )
    return goes_on


def _message(where: str, message: types.ChatMessage) -> Message:
    if isinstance(message, types.AssistantMessage):
        return _assistant(where, message)
    content = text_of(f"{where}.content", message.content)
    if isinstance(message, types.ToolMessage):
        found: Message = {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    elif isinstance(message, types.FunctionMessage):
        found = {"role": "tool", "content": content}
    elif isinstance(message, types.UserMessage):
        found = {"role": "user", "content": content}
    else:  # chat templates know "system"; OpenAI renamed it for newer models
        found = {"role": "system", "content": content}
    return found | ({"name": message.name} if message.name else {})


def _assistant(where: str, message: types.AssistantMessage) -> Message:
    if message.content is None and not (message.tool_calls or message.function_call):
        if message.refusal is None:
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        return {"role": "assistant", "content": message.refusal}
    found: Message = {"role": "assistant", "content": text_of(f"{where}.content", message.content)}
    if thoughts := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = thoughts
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(types.CallMade(message.function_call))
    if calls:
        found["tool_calls"] = [
            made_call(
                f"{where}.tool_calls[{i}]", call.id, call.function.name, call.function.arguments
            )
            for i, call in enumerate(calls)
        ]
    return found


def made_call(where: str, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as chat templates have it, whose arguments are an object."""
    if isinstance(arguments, str):
        try:
            arguments = json_text.parsed(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: arguments must be a JSON object", param=where)
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def text_of(where: str, content: types.Content | None) -> str:
    """A text, or the texts of a list of parts. Raises InvalidRequest for parts of other kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, types.TextPart):
            texts.append(part.text)
        elif isinstance(part, types.RefusalPart):
            texts.append(part.refusal)
        else:
            kind = part.__struct_config__.tag
            raise InvalidRequest(
                f"{where}[{i}] is of type {kind}; only text is supported", param=f"{where}[{i}]"
            )
    return "".join(texts)


def tool_of(function: types.Function) -> Tool:
    return Tool(
        function.name,
        function.description or "",
        function.parameters or {},
        bool(function.strict),
    )


def _tools(body: types.ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    offered: list[Tool] = []
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, types.CustomTool):
            raise InvalidRequest(
                f"tools[{i}] is of type custom; only functions are supported", param=f"tools[{i}]"
            )
        offered.append(tool_of(tool.function))
    offered += [tool_of(function) for function in body.functions or ()]
    wanted = body.tool_choice
    if wanted is None and body.function_call is not None:
        call = body.function_call
        wanted = call if isinstance(call, str) else types.NamedChoice(call)
    parallel = body.parallel_tool_calls is not False
    if wanted is None or isinstance(wanted, str):
        return chosen_tools(offered, wanted or "auto", None, parallel=parallel)
    if isinstance(wanted, types.AllowedChoice):
        names = [choice.function.name for choice in wanted.allowed_tools.tools]
        return chosen_tools(offered, wanted.allowed_tools.mode, names, parallel=parallel)
    return chosen_tools(offered, "required", [wanted.function.name], parallel=False)


def chosen_tools(
    offered: Sequence[Tool], mode: str, names: Sequence[str] | None, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, of `names` if given, and how.

    Raises:
        InvalidRequest: two have one name, a name is of none, or one is required of none.
    """
    by_name = {tool.name: tool for tool in offered}
    if len(by_name) < len(offered):
        raise InvalidRequest("two tools have the same name", param="tools")
    if names is not None:
        if unknown := [name for name in names if name not in by_name]:
            raise InvalidRequest(
                f"tool_choice names {unknown[0]!r}, which is none of the tools", param="tool_choice"
            )
        offered = [tool for tool in offered if tool.name in names]
    if mode == "required" and not offered:
        raise InvalidRequest("tool_choice requires a tool, and there is none", param="tool_choice")
    if mode == "none":
        return (), ToolChoice("none")
    return tuple(offered), ToolChoice(mode, parallel)


def _thinking(body: types.ChatBody, options: dict[str, Any]) -> Thinking:
    effort, wanted = body.reasoning_effort, body.enable_thinking
    if effort == "none":
        effort, wanted = None, False if wanted is None else wanted
    for name in ("enable_thinking", "thinking"):
        if wanted is None and isinstance(options.get(name), bool):
            wanted = options[name]
    return Thinking(wanted, body.max_reasoning_tokens, effort)


def format_grammar(body: types.GenerationFields) -> str | None:
    """The grammar of whatever field asks for a format; None if none does.

    Raises:
        InvalidRequest: several do, or one that cannot be.
    """
    found = [(name, text) for name, text in _grammars(body) if text is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def _grammars(body: types.GenerationFields) -> list[tuple[str, str | None]]:
    outputs = body.structured_outputs or types.StructuredOutputs()
    schemas = {
        "structured_outputs": outputs.json,
        "guided_json": body.guided_json,
        "json_schema": body.json_schema,
    }
    found = [("response_format", _response_format(body.response_format))]
    found += [(name, None if of is None else _schema(name, of)) for name, of in schemas.items()]
    if outputs.json_object:
        found.append(("structured_outputs", grammar.of_any_json()))
    for name, pattern in (
        ("structured_outputs", outputs.regex),
        ("guided_regex", body.guided_regex),
        ("regex", body.regex),
    ):
        found.append((name, None if pattern is None else grammar.of_regex(pattern)))
    for name, choices in (
        ("structured_outputs", outputs.choice),
        ("guided_choice", body.guided_choice),
    ):
        if choices is not None and not all(choices or [""]):
            raise InvalidRequest(f"{name} needs choices that are not empty", param=name)
        found.append((name, grammar.of_choices(choices) if choices else None))
    for name, text in (
        ("structured_outputs", outputs.grammar),
        ("guided_grammar", body.guided_grammar),
        ("grammar", body.grammar),
        ("ebnf", body.ebnf),
    ):
        found.append((name, None if text is None else grammar.of_lark(text)))
    return found


def _response_format(wanted: types.ResponseFormat | None) -> str | None:
    if isinstance(wanted, types.ObjectFormat):
        return grammar.of_json_schema(wanted.schema) if wanted.schema else grammar.of_any_json()
    if isinstance(wanted, types.SchemaFormat):
        schema = wanted.json_schema.schema
        return grammar.of_any_json() if schema is None else grammar.of_json_schema(schema)
    if isinstance(wanted, types.RegexFormat):
        return grammar.of_regex(wanted.pattern)
    if isinstance(wanted, types.GrammarFormat):
        return grammar.of_lark(wanted.grammar)
    return None


def _schema(name: str, schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json_text.parsed(schema)
        except ValueError as error:
            raise InvalidRequest(f"{name} is no JSON: {error}", param=name) from error
    return grammar.of_json_schema(schema)
