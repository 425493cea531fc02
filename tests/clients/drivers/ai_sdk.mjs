// The AI SDK: `@ai-sdk/openai-compatible` (chat completions) and `@ai-sdk/openai` (Responses, its default).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import * as report from "./report.mjs";
const { tried, same, check, MODEL } = report;
globalThis.AI_SDK_LOG_WARNINGS = false;

const where = { baseURL: report.BASE_URL, apiKey: report.API_KEY };
const compatible = createOpenAICompatible({ name: "diffuse", includeUsage: true, supportsStructuredOutputs: true, ...where });
const newer = createOpenAI(where);
const both = [compatible(MODEL), newer(MODEL)];
const told = { maxOutputTokens: 300, maxRetries: 0, temperature: 0 };
const get_weather = ai.tool({
  description: "Tell the weather of a city.",
  inputSchema: ai.jsonSchema(report.TOOL.parameters),
  execute: async () => "sunny",
});
const asking = ai.tool({ description: "Tell the weather of a city.", inputSchema: ai.jsonSchema(report.TOOL.parameters) });
const callsOf = (calls) => calls.map((call) => [call.toolName, call.input]);

// What a stream's parts hold, as `streamText` takes them in.
async function gathered(options) {
  const stream = ai.streamText({ ...told, onError: () => {}, ...options });
  const found = { text: "", calls: [], error: undefined };
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta") found.text += part.text;
    if (part.type === "tool-call") found.calls.push(part);
    if (part.type === "error") found.error = part.error;
    if (part.type === "finish") Object.assign(found, { usage: part.totalUsage, finish: part.finishReason });
  }
  return found;
}

await tried("chat", async () => {
  for (const model of both) report.answered((await ai.generateText({ model, prompt: report.HELLO, ...told })).text);
});

await tried("streaming", async () => {
  for (const model of both) {
    const found = await gathered({ model, prompt: report.HELLO });
    report.answered(found.text);
    check(!found.error, found.error);
    if (report.IS_SCRIPTED) same(found.finish, "stop");
  }
});

await tried("unicode", async () => {
  report.needsScript();
  for (const model of both) same((await gathered({ model, prompt: `Say: ${report.UNICODE}` })).text, report.UNICODE);
});

await tried("usage", async () => {
  for (const model of both) {
    const { usage } = await ai.generateText({ model, prompt: report.HELLO, ...told });
    check(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
    const found = await gathered({ model, prompt: report.HELLO });
    check(found.usage.outputTokens > 0, JSON.stringify(found.usage));
  }
});

await tried("tools", async () => {
  for (const model of both) {
    const options = { model, prompt: report.WEATHER, tools: { get_weather: asking }, toolChoice: "required", ...told };
    report.areCalls(callsOf((await ai.generateText(options)).toolCalls).slice(0, 1), "Paris");
    report.areCalls(callsOf((await gathered(options)).calls).slice(0, 1), "Paris");
  }
});

await tried("parallel tools", async () => {
  report.needsScript("how many calls are made hangs on the model's wit");
  for (const model of both) {
    const options = { model, prompt: report.WEATHERS, tools: { get_weather: asking }, toolChoice: "required" };
    report.areCalls(callsOf((await ai.generateText({ ...options, ...told })).toolCalls), "Paris", "Rome");
    report.areCalls(callsOf((await gathered(options)).calls), "Paris", "Rome");
  }
});

await tried("tool result", async () => {
  report.needsScript("a free choice: whether a tool is called hangs on the model's wit");
  for (const model of both) {
    const options = { model, prompt: report.WEATHER, tools: { get_weather }, stopWhen: ai.stepCountIs(3), ...told };
    report.isTold((await ai.generateText(options)).text);
    report.isTold((await gathered(options)).text);
  }
});

await tried("structured", async () => {
  for (const model of both) {
    const output = ai.Output.object({ schema: ai.jsonSchema(report.PERSON_SCHEMA) });
    report.isPerson((await ai.generateText({ model, prompt: report.PERSON, output, ...told })).output);
    const stream = ai.streamText({ model, prompt: report.PERSON, output, ...told });
    report.isPerson(await stream.output);
  }
});

await tried("wrong key", async () => {
  report.needsKey();
  for (const make of [createOpenAI, (options) => createOpenAICompatible({ name: "diffuse", ...options })]) {
    const model = make({ ...where, apiKey: "wrong" })(MODEL);
    same((await report.fails(() => ai.generateText({ model, prompt: report.HELLO, ...told }))).statusCode, 401);
  }
});

await tried("unknown model", async () => {
  for (const make of [compatible, newer]) {
    const error = await report.fails(() => ai.generateText({ model: make("nobody"), prompt: report.HELLO, ...told }));
    same(error.statusCode, 404);
    check(error.message.includes("nobody"), error.message);
  }
});

await tried("overflow", async () => {
  for (const model of both) {
    const error = await report.fails(() => ai.generateText({ model, prompt: report.TOO_LONG, ...told }));
    same(error.statusCode, 400);
    check(error.message.includes("maximum context length"), error.message);
    check(!error.isRetryable, "it would be tried again");
  }
});

await tried("broken stream", async () => {
  report.needsScript("no node is lost here");
  for (const model of both) {
    const { error } = await gathered({ model, prompt: "Break" });
    check(error && JSON.stringify(error, Object.getOwnPropertyNames(error)).includes("layers 10:20"), `seen: ${error}`);
  }
});

await tried("responses", async () => {
  report.answered((await ai.generateText({ model: newer.responses(MODEL), prompt: report.HELLO, ...told })).text);
  report.answered((await ai.generateText({ model: newer.chat(MODEL), prompt: report.HELLO, ...told })).text);
});

await tried("completions", async () => {
  const model = compatible.completionModel(MODEL);
  check((await ai.generateText({ model, prompt: "once", maxOutputTokens: 5 })).usage.outputTokens > 0, "no usage");
});

await tried("embeddings", async () => {
  const name = await report.modelFor("embeddings");
  for (const model of [compatible.embeddingModel(name), newer.embedding(name)]) {
    const { embeddings } = await ai.embedMany({ model, values: ["one", "two"] });
    same(embeddings.length, 2);
    check(embeddings[0].length > 1, "an empty vector");
  }
});

await tried("images", async () => {
  const model = compatible.imageModel(await report.modelFor("image"));
  const { image } = await ai.generateImage({ model, prompt: "a red circle", size: "64x64" });
  same(image.mediaType, "image/png");
});

await tried("transcription", async () => {
  const model = newer.transcription(await report.modelFor("text", "audio"));
  try {
    check((await ai.experimental_transcribe({ model, audio: report.aRecording() })).text, "no text");
  } catch (error) {
    // Silence has no words, which this client takes for an error.
    if (report.IS_SCRIPTED || error.name !== "AI_NoTranscriptGeneratedError") throw error;
  }
});

await tried("speech", async () => {
  const model = newer.speech(await report.modelFor("audio"));
  const { audio } = await ai.experimental_generateSpeech({ model, text: "rain", voice: "alloy" });
  check(audio.uint8Array.length > 100, "no sound");
});
