// What is said in a recording, as it is heard; and how alike texts are, by their vectors.

import { call, events, read } from "./api.js";
import { el } from "./dom.js";
import { count, time } from "./words.js";

/** Write a recording down. The text of the prompt says how names are spelled. */
export async function transcript({ card, text, files, options, turn, signal, progress }) {
  const form = new FormData();
  form.append("file", files[0].file, files[0].name);
  form.append("model", card.id);
  form.append("stream", "true");
  form.append("stream_options", JSON.stringify({ include_progress: true }));
  if (text) form.append("prompt", text);
  if (options.language) form.append("language", options.language);
  progress("listens");
  let heard = 0;
  const response = await call("v1/audio/transcriptions", { body: form, signal });
  for await (const { data } of events(response)) {
    if (data.type === "transcript.text.delta") turn.add(data.delta);
    if (data.done_s) { heard = data.total_s; progress(`heard ${time(data.done_s)} of ${time(data.total_s)}`); }
  }
  progress("");
  turn.end([heard ? `a recording of ${time(heard)}` : ""], null, response.headers.get("x-request-id"));
}

/** Compare the lines of the prompt with the first of them. */
export async function vectors({ card, text, turn, signal }) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  const answer = await read("v1/embeddings", { signal, body: { model: card.id, input: lines, encoding_format: "float" } });
  const [first, ...others] = answer.data.map((item) => item.embedding);
  const rows = others.map((vector, number) => {
    const alike = cosine(first, vector);
    const fill = el("i", { class: "compute" });
    fill.style.width = `${Math.round(100 * Math.max(0, alike))}%`;
    return el("tr", {}, el("th", { scope: "row", text: lines[number + 1] }), el("td", { text: alike.toFixed(2) }),
      el("td", {}, el("span", { class: "split", "aria-hidden": "true" }, fill)));
  });
  turn.put(el("p", { text: rows.length ? `How alike each line is to “${lines[0]}”:` : `A vector of ${first.length} numbers. Write more lines to compare them with the first.` }),
    rows.length ? el("table", { class: "alike" }, el("tbody", {}, ...rows)) : "");
  turn.end([count(answer.usage.total_tokens, "token"), `${first.length} numbers each`], answer.timings, null);
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}
