// npm `openai`.
import OpenAI, { toFile } from "openai";
import * as report from "./report.mjs";
const { tried, same, check, MODEL } = report;

const client = new OpenAI({ baseURL: report.BASE_URL, apiKey: report.API_KEY, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const ask = (text, fields = {}) =>
  client.chat.completions.create({ model: MODEL, messages: user(text), max_tokens: 100, temperature: 0, ...fields });
const callsOf = (message) =>
  (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
const tools = [{ type: "function", function: report.TOOL }];
const form = { type: "json_schema", json_schema: { name: "person", strict: true, schema: report.PERSON_SCHEMA } };

async function joined(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
  return text;
}

await tried("chat", async () => {
  const answer = await ask(report.HELLO);
  report.answered(answer.choices[0].message.content);
  check(answer._request_id, "no request id");
});

await tried("streaming", async () => {
  report.answered(await joined(await ask(report.HELLO, { stream: true })));
  const stream = client.chat.completions.stream({ model: MODEL, messages: user(report.HELLO), temperature: 0, max_tokens: 100 });
  report.answered(await stream.finalContent());
});

await tried("unicode", async () => {
  report.needsScript();
  same(await joined(await ask(`Say: ${report.UNICODE}`, { stream: true })), report.UNICODE);
});

await tried("usage", async () => {
  const { usage } = await ask(report.HELLO, { seed: 1 });
  same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  const stream = client.chat.completions.stream({
    model: MODEL, messages: user(report.HELLO), temperature: 0, max_tokens: 100, seed: 1, stream_options: { include_usage: true },
  });
  same((await stream.totalUsage()).completion_tokens, usage.completion_tokens);
});

await tried("tools", async () => {
  for (const choice of report.IS_SCRIPTED ? ["auto", "required"] : ["required"]) {
    const told = { tools, tool_choice: choice, parallel_tool_calls: false, max_tokens: 600 };
    report.areCalls(callsOf((await ask(report.WEATHER, told)).choices[0].message), "Paris");
    const stream = client.chat.completions.stream({ model: MODEL, messages: user(report.WEATHER), ...told });
    report.areCalls(callsOf(await stream.finalMessage()), "Paris");
  }
});

await tried("parallel tools", async () => {
  report.needsScript("how many calls are made hangs on the model's wit");
  const told = { tools, tool_choice: "required", max_tokens: 900 };
  report.areCalls(callsOf((await ask(report.WEATHERS, told)).choices[0].message), "Paris", "Rome");
  const stream = client.chat.completions.stream({ model: MODEL, messages: user(report.WEATHERS), ...told });
  report.areCalls(callsOf(await stream.finalMessage()), "Paris", "Rome");
});

await tried("tool result", async () => {
  report.needsScript("a free choice: whether a tool is called hangs on the model's wit");
  const told = { name: "get_weather", description: "Tell the weather.", parameters: report.TOOL.parameters };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages: user(report.WEATHER),
    tools: [{ type: "function", function: { ...told, parse: JSON.parse, function: () => "sunny" } }],
  });
  report.isTold(await runner.finalContent());
});

await tried("structured", async () => {
  const told = { response_format: form, max_tokens: 200 };
  report.isPerson(JSON.parse((await ask(report.PERSON, told)).choices[0].message.content));
  const made = await client.chat.completions.parse({ model: MODEL, messages: user(report.PERSON), ...told });
  check(made.choices[0].message.content, "nothing");
});

await tried("wrong key", async () => {
  report.needsKey();
  const error = await report.fails(() => new OpenAI({ baseURL: report.BASE_URL, apiKey: "wrong", maxRetries: 0 }).models.list());
  check(error instanceof OpenAI.AuthenticationError, error);
  same(error.code, "invalid_api_key");
});

await tried("unknown model", async () => {
  const error = await report.fails(() => ask(report.HELLO, { model: "nobody" }));
  check(error instanceof OpenAI.NotFoundError, error);
  same([error.code, error.param], ["model_not_found", "model"]);
});

await tried("overflow", async () => {
  const error = await report.fails(() => ask(report.TOO_LONG));
  check(error instanceof OpenAI.BadRequestError, error);
  same(error.code, "context_length_exceeded");
});

await tried("broken stream", async () => {
  report.needsScript("no node is lost here");
  const error = await report.fails(async () => joined(await ask("Break", { stream: true })));
  check(error.message.includes("layers 10:20"), error.message);
});

await tried("responses", async () => {
  const told = { model: MODEL, max_output_tokens: 300, temperature: 0 };
  report.answered((await client.responses.create({ input: report.HELLO, ...told })).output_text);
  const stream = client.responses.stream({ input: report.HELLO, ...told });
  report.answered((await stream.finalResponse()).output_text);
  const made = await client.responses.create({
    input: report.WEATHER, tools: [{ type: "function", strict: true, ...report.TOOL }], tool_choice: "required", ...told,
  });
  const calls = made.output.filter((item) => item.type === "function_call").slice(0, 1);
  report.areCalls(calls.map((call) => [call.name, JSON.parse(call.arguments)]), "Paris");
  const text = { format: { type: "json_schema", name: "person", strict: true, schema: report.PERSON_SCHEMA } };
  report.isPerson(JSON.parse((await client.responses.create({ input: report.PERSON, text, ...told })).output_text));
});

await tried("completions", async () => {
  same((await client.completions.create({ model: MODEL, prompt: "once", max_tokens: 5 })).usage.completion_tokens, 5);
});

await tried("models", async () => {
  const names = [];
  for await (const card of client.models.list()) names.push(card.id);
  check(names.includes(MODEL), names.join());
  same((await client.models.retrieve(MODEL)).id, MODEL);
});

await tried("embeddings", async () => {
  const made = await client.embeddings.create({ model: await report.modelFor("embeddings"), input: ["one", "two"] });
  same(made.data.length, 2);
  check(made.data[0].embedding.length > 1, "an empty vector");
});

await tried("images", async () => {
  const steps = report.IS_SCRIPTED ? {} : { steps: 2 };
  const made = await client.images.generate({ model: await report.modelFor("image"), prompt: "a red circle", ...steps });
  check(Buffer.from(made.data[0].b64_json, "base64").subarray(1, 4).toString() === "PNG", "no PNG");
});

await tried("transcription", async () => {
  const file = await toFile(report.aRecording(), "silence.wav");
  const made = await client.audio.transcriptions.create({ model: await report.modelFor("text", "audio"), file });
  check(typeof made.text === "string", "no text");
});

await tried("speech", async () => {
  const made = await client.audio.speech.create({ model: await report.modelFor("audio"), voice: "alloy", input: "rain" });
  check((await made.arrayBuffer()).byteLength > 100, "no sound");
});
