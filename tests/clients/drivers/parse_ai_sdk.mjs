// What the AI SDK (with eventsource-parser) reads of recorded streams: one JSON line for each.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const scenarios = JSON.parse(process.env.SCENARIOS);
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = { get_weather: ai.tool({ inputSchema: ai.jsonSchema(schema) }) };
const ENDS = { stop: "completed", "tool-calls": "completed", length: "incomplete" };
const whole = (error) => JSON.stringify(error, Object.getOwnPropertyNames(error ?? {}));

for (const [name, kind] of Object.entries(scenarios)) {
  const where = { baseURL: `${process.env.REPLAY}/${name.replaceAll(" ", "-")}/v1`, apiKey: "none" };
  const compatible = createOpenAICompatible({ name: "diffuse", includeUsage: true, ...where });
  const model = {
    chat: () => compatible("fixture"),
    completions: () => compatible.completionModel("fixture"),
    responses: () => createOpenAI(where)("fixture"),
  }[kind]();
  const found = { text: [""], reasoning: "", calls: [], error: false };
  const stream = ai.streamText({ model, prompt: "x", maxRetries: 0, onError: () => {}, ...(kind === "completions" ? {} : { tools }) });
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta") found.text[0] += part.text;
    if (part.type === "reasoning-delta") found.reasoning += part.text;
    if (part.type === "tool-call") found.calls.push([part.toolName, part.input]);
    if (part.type === "error") {
      const told = `${part.error?.message} ${typeof part.error === "string" ? part.error : whole(part.error)}`;
      found.error = told.includes("layers 10:20") || told;
    }
    if (part.type === "finish") {
      const { inputTokens, outputTokens } = part.totalUsage;
      found.usage = inputTokens === undefined ? null : [inputTokens, outputTokens];
      found.finish = [kind === "responses" ? ENDS[part.finishReason] : part.finishReason];
    }
  }
  console.log(JSON.stringify({ scenario: name, reading: found }));
}
