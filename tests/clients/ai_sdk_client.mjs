// Vercel's AI SDK with its OpenAI-compatible provider: text, stream, object, tools.
// needs: ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7

import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const { EXO_URL, EXO_MODEL } = process.env;
const provider = createOpenAICompatible({
  name: "exo", baseURL: `${EXO_URL}/v1`, supportsStructuredOutputs: true,
});
const model = provider(EXO_MODEL);
const short = { model, prompt: "hello", maxOutputTokens: 8, temperature: 0 };
const { text } = await generateText(short);
let streamed = "";
for await (const part of streamText(short).textStream) streamed += part;
assert.equal(streamed, text);
const schema = z.object({ city: z.enum(["Bern", "Rome"]) });
const long = { model, prompt: "hello", maxOutputTokens: 300, temperature: 0 };
const { object } = await generateObject({ ...long, schema });
const weather = tool({ description: "Of a city", inputSchema: schema, execute: () => "sunny" });
const { toolResults } = await generateText({
  ...long, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" },
});
assert.equal(toolResults[0].output, "sunny");
console.log(JSON.stringify([text, object, toolResults[0].input]));
