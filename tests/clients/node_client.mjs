#!/usr/bin/env node
// The Node client of OpenAI, unmodified, against a running cotenant.
//
//     COTENANT_NODE_CLIENTS=… node node_client.mjs http://127.0.0.1:8410 [rounds]
//
// Its realtime client is left out: it connects with TLS only.
// Every check prints one line; the exit code is 0 when all of them hold.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

// the packages lie in a separate folder
const require = createRequire(`${process.env.COTENANT_NODE_CLIENTS}/`);
const OpenAI = require("openai").default;

const [host, rounds = "1"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${host}/v1`, apiKey: "unused" });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "turn on the kitchen light" }];
const schema = {
  type: "object",
  properties: { room: { enum: ["kitchen", "hall"] }, on: { type: "boolean" } },
  required: ["room", "on"],
};
const tool = { type: "function", function: { name: "set_light", parameters: schema } };

const checks = {
  async "an answer, and a stream that says the same"() {
    const settings = { model, messages, temperature: 0, max_tokens: 24 };
    const whole = await client.chat.completions.create(settings);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...settings, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(text && ["stop", "length"].includes(whole.choices[0].finish_reason));
  },
  async "a tool is called, and a form is kept"() {
    const tool_choice = { type: "function", function: { name: "set_light" } };
    const called = await client.chat.completions.create({ model, messages, tools: [tool], tool_choice, temperature: 0, max_tokens: 160 });
    assert.equal(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).on, "boolean");
    const response_format = { type: "json_schema", json_schema: { name: "light", schema } };
    const formed = await client.chat.completions.create({ model, messages, response_format, temperature: 0, max_tokens: 160 });
    assert.equal(typeof JSON.parse(formed.choices[0].message.content).on, "boolean");
  },
  async "a response of the Responses API"() {
    const response = await client.responses.create({ model, input: "turn on the kitchen light", max_output_tokens: 24 });
    assert.ok(response.output_text);
  },
  async "a cancelled request leaves the next one served"() {
    const stream = await client.chat.completions.create({ model, messages, stream: true });
    for await (const _chunk of stream) {
      stream.controller.abort();
      break;
    }
    const aborter = new AbortController();
    const gone = client.chat.completions.create({ model, messages }, { signal: aborter.signal });
    aborter.abort();
    await assert.rejects(gone);
    const next = await client.chat.completions.create({ model, messages, max_tokens: 8 });
    assert.ok(next.choices[0].message.content);
  },
};

let failed = 0;
for (const [name, run] of Object.entries(checks)) {
  const began = performance.now();
  try {
    for (let round = 0; round < Number(rounds); round += 1) await run();
    console.log(`  ok  ${name} (${((performance.now() - began) / 1000).toFixed(2)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`  !!  ${name}: ${error}`);
  }
}
process.exit(failed ? 1 : 0);
