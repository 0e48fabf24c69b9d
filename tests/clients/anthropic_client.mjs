// Anthropic's JavaScript client: whole, streamed, a tool and its result, counted.
// needs: @anthropic-ai/sdk@1.14.0

import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const { EXO_URL, EXO_MODEL: model } = process.env;
const client = new Anthropic({ baseURL: EXO_URL, apiKey: "none" });
const messages = [{ role: "user", content: "hello" }];
const whole = await client.messages.create({ model, messages, max_tokens: 8 });
const stream = client.messages.stream({ model, messages, max_tokens: 8 });
assert.equal((await stream.finalMessage()).content[0].text, whole.content[0].text);
const input_schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bern", "Rome"] } },
  required: ["city"],
};
const tools = [{ name: "weather", input_schema }];
const tool_choice = { type: "any", disable_parallel_tool_use: true };
const called = await client.messages.create({ model, messages, max_tokens: 200, tools, tool_choice });
const [use] = called.content;
const result = { type: "tool_result", tool_use_id: use.id, content: "sunny" };
const after = await client.messages.create({
  model, tools, max_tokens: 8,
  messages: [...messages, { role: "assistant", content: [use] }, { role: "user", content: [result] }],
});
const counted = await client.messages.countTokens({ model, messages });
console.log(JSON.stringify([whole.content[0].text, use.input, after.stop_reason, counted]));
