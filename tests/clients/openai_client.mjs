// OpenAI's JavaScript client: whole, streamed, a schema, a tool, Responses, embeddings.
// needs: openai@7.59.0

import assert from "node:assert";
import OpenAI from "openai";

const { EXO_URL, EXO_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${EXO_URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "hello" }];
const short = { model, messages, max_tokens: 8, temperature: 0 };
const whole = (await client.chat.completions.create(short)).choices[0].message.content;
let text = "";
for await (const part of await client.chat.completions.create({ ...short, stream: true })) {
  text += part.choices[0]?.delta.content ?? "";
}
assert.equal(text, whole);
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bern", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const long = { model, messages, max_tokens: 200, temperature: 0 };
const format = { type: "json_schema", json_schema: { name: "place", strict: true, schema } };
const place = await client.chat.completions.create({ ...long, response_format: format });
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const called = await client.chat.completions.create({
  ...long, tools, tool_choice: "required", parallel_tool_calls: false,
});
const response = await client.responses.create({ model, input: "hello", max_output_tokens: 8 });
const vectors = await client.embeddings.create({ model, input: "hello" });
console.log(JSON.stringify([
  whole,
  JSON.parse(place.choices[0].message.content),
  JSON.parse(called.choices[0].message.tool_calls[0].function.arguments),
  response.output_text,
  vectors.data[0].embedding.length,
]));
