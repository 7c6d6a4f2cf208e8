// openai and the AI SDK, in Node: each asks the cluster with a drafter and the one without, and compares what they say.
import assert from "node:assert/strict";
import test from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";

const URLS = [process.env.DRAFTED, process.env.PLAIN].map((address) => `http://${address}/v1`);
const QUESTION = "What is the weather in Bern?";
const SCHEMA = {
  type: "object",
  properties: { city: { enum: ["Bern", "Ulm"] }, days: { type: "integer", minimum: 1, maximum: 99 } },
  required: ["city", "days"],
  additionalProperties: false,
};

async function same(flow) {
  const [drafted, plain] = [await flow(URLS[0]), await flow(URLS[1])];
  assert.deepEqual(drafted, plain);
  return drafted;
}

test("openai streams a chat", async () => {
  const text = await same(async (baseURL) => {
    const client = new OpenAI({ baseURL, apiKey: "unused" });
    const messages = [{ role: "user", content: QUESTION }];
    const stream = await client.chat.completions.create({ model: "target", messages, seed: 5, max_tokens: 24, stream: true });
    let text = "";
    for await (const part of stream) text += part.choices[0]?.delta?.content ?? "";
    return text;
  });
  assert.ok(text);
});

for (const [name, model] of [
  ["openai", (baseURL) => createOpenAI({ baseURL, apiKey: "unused" })("target")],
  ["openai-compatible", (baseURL) => createOpenAICompatible({ name: "outrider", baseURL, supportsStructuredOutputs: true })("target")],
]) {
  test(`the AI SDK answers, streams and calls a tool by ${name}`, async () => {
    const asked = { prompt: QUESTION, temperature: 0, maxOutputTokens: 24 };
    assert.ok(await same(async (url) => (await generateText({ model: model(url), ...asked })).text));
    assert.ok(await same(async (url) => await streamText({ model: model(url), ...asked }).text));
    const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(SCHEMA) }) };
    const calls = await same(async (url) => {
      const answer = await generateText({ model: model(url), ...asked, maxOutputTokens: 400, tools, toolChoice: "required" });
      return answer.toolCalls.map((call) => call.input);
    });
    assert.ok(["Bern", "Ulm"].includes(calls[0].city));
  });

  test(`the AI SDK makes an object by ${name}`, async () => {
    const made = await same(async (url) => {
      const output = Output.object({ schema: jsonSchema(SCHEMA) });
      return (await generateText({ model: model(url), prompt: QUESTION, temperature: 0, maxOutputTokens: 100, output })).output;
    });
    assert.ok(["Bern", "Ulm"].includes(made.city));
  });
}
