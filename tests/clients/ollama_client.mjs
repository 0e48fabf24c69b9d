// Ollama's JavaScript client: whole, streamed, a format, embeddings, the list.
// needs: ollama@0.6.4

import assert from "node:assert";
import { Ollama } from "ollama";

const { EXO_URL, EXO_MODEL: model } = process.env;
const client = new Ollama({ host: EXO_URL });
const messages = [{ role: "user", content: "hello" }];
const options = { num_predict: 8, temperature: 0 };
const whole = (await client.chat({ model, messages, options })).message.content;
let text = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
}
assert.equal(text, whole);
const format = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"] };
const formed = await client.chat({ model, messages, format, options: { num_predict: 100 } });
const { embeddings } = await client.embed({ model, input: "hello" });
assert((await client.list()).models);
console.log(JSON.stringify([whole, JSON.parse(formed.message.content), embeddings[0].length]));
