// What npm `openai` reads of recorded streams: one JSON line for each.
import OpenAI from "openai";

const scenarios = JSON.parse(process.env.SCENARIOS);
const pair = (usage, first, second) => (usage ? [usage[first], usage[second]] : null);

async function chat(client, found) {
  const asked = { model: "fixture", messages: [{ role: "user", content: "x" }] };
  const texts = {};
  let thought = "";
  let told = [];
  try {
    for await (const chunk of await client.chat.completions.create({ stream: true, ...asked })) {
      for (const { index, delta, logprobs } of chunk.choices) {
        texts[index] = (texts[index] ?? "") + (delta.content ?? "");
        thought += delta.reasoning_content ?? "";
        for (const token of logprobs?.content ?? []) told = told.concat(token.bytes);
      }
      if (chunk.usage) found.usage = pair(chunk.usage, "prompt_tokens", "completion_tokens");
    }
  } finally {
    found.text = Object.keys(texts).sort().map((index) => texts[index]);
  }
  Object.assign(found, { reasoning: thought, logprobs: Buffer.from(told).toString() });
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  const calls = final.choices.flatMap((choice) => choice.message.tool_calls ?? []);
  found.calls = calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  found.finish = final.choices.map((choice) => choice.finish_reason);
  const same = final.choices.map((choice) => choice.message.content ?? "");
  if (JSON.stringify(same) !== JSON.stringify(found.text)) throw new Error(`the helper reads ${JSON.stringify(same)}`);
}

async function completions(client, found) {
  for await (const chunk of await client.completions.create({ model: "fixture", prompt: "x", stream: true })) {
    for (const choice of chunk.choices) {
      found.text[0] += choice.text;
      if (choice.finish_reason) found.finish = [choice.finish_reason];
    }
    if (chunk.usage) found.usage = pair(chunk.usage, "prompt_tokens", "completion_tokens");
  }
}

async function responses(client, found) {
  let end;
  for await (const event of await client.responses.create({ model: "fixture", input: "x", stream: true })) {
    if (event.type === "response.output_text.delta") found.text[0] += event.delta;
    end = event;
  }
  found.finish = [end.type.replace("response.", "")];
  found.error = end.type === "response.failed" && end.response.error.message.includes("layers 10:20");
  const calls = end.response.output.filter((item) => item.type === "function_call");
  found.calls = calls.map((call) => [call.name, JSON.parse(call.arguments)]);
  found.usage = pair(end.response.usage, "input_tokens", "output_tokens");
}

for (const [name, kind] of Object.entries(scenarios)) {
  const baseURL = `${process.env.REPLAY}/${name.replaceAll(" ", "-")}/v1`;
  const found = { text: [""], error: false };
  try {
    await { chat, completions, responses }[kind](new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }), found);
  } catch (error) {
    found.error = String(error.message).includes("layers 10:20") || `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ scenario: name, reading: found }));
}
