// A conversation: what was said so far goes with every question, and the answer comes as it is made.

import { call, events } from "./api.js";
import { base64, wavOrMp3 } from "./attachments.js";
import * as bars from "./bars.js";
import { between } from "./parts.js";
import * as route from "./route.js";
import { count, time } from "./words.js";

const END = { length: "as long as was asked for", content_filter: "ended by a filter" };

let history = [];

/** Begin anew. */
export function forget() { history = []; }

/** Ask, and show the answer in `turn` as it comes. What there is when it is stopped counts as said. */
export async function answer({ card, text, files, options, turn, signal, progress }) {
  const { system, ...settings } = options;
  const question = { role: "user", content: await content(text, files) };
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history, question];
  const asked = performance.now();
  const run = { first: null, tokens: 0, timings: null, finish: null };
  try {
    const response = await call("v1/chat/completions", { signal, body: {
      model: card.id, messages, stream: true, timings_per_token: true, stream_options: { include_usage: true }, ...settings,
    } });
    run.id = response.headers.get("x-request-id");
    for await (const { data } of events(response)) take(data, run, turn, progress, asked);
  } finally {
    progress("");
    if (turn.text) history.push(question, { role: "assistant", content: turn.text });
  }
  turn.end(facts(run), run.timings, run.id);
}

function take(chunk, run, turn, progress, asked) {
  const choice = chunk.choices?.[0];
  if (chunk.prefill) progress(`reads the prompt, ${chunk.prefill.done} of ${chunk.prefill.total} tokens`);
  if (choice?.delta?.reasoning_content) progress("thinks");
  if (choice?.delta?.content) {
    run.first ??= performance.now() - asked;
    progress("");
    turn.add(choice.delta.content);
  }
  if (choice?.finish_reason) run.finish = choice.finish_reason;
  if (chunk.replays) run.replays = chunk.replays;
  if (chunk.usage) run.tokens = chunk.usage.completion_tokens;
  if (chunk.timings) measure(chunk.timings, run);
}

function measure(timings, run) {
  const added = timings.tokens - (run.timings?.tokens ?? 0);
  if (added > 0 && run.timings) { // the first holds the whole prompt
    const each = between(run.timings, timings, added);
    for (let number = 0; number < Math.min(added, 8); number += 1) bars.add(each);
    route.pulse((1000 * (timings.total_s - run.timings.total_s)) / added);
  }
  run.timings = timings;
}

function facts(run) {
  const { timings } = run;
  const speed = timings?.decode_s > 0 && timings.tokens > 1 ? `${((timings.tokens - 1) / timings.decode_s).toFixed(1)} a second` : "";
  return [run.tokens ? count(run.tokens, "token") : "", speed, run.first ? `first after ${time(run.first / 1000)}` : "",
    run.replays ? `${count(run.replays, "route was rebuilt", "routes were rebuilt")} on the way` : "", END[run.finish] ?? ""];
}

async function content(text, files) {
  if (!files.length) return text;
  const parts = await Promise.all(files.map(async ({ file, kind }) => {
    const data = await base64(file);
    return kind === "image"
      ? { type: "image_url", image_url: { url: `data:${file.type};base64,${data}` } }
      : { type: "input_audio", input_audio: { data, format: wavOrMp3(file) } };
  }));
  return [...parts, ...(text ? [{ type: "text", text }] : [])];
}
