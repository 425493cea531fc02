// Pictures, videos and sounds: a prompt goes out, steps and previews come back, then the thing itself.

import { bytes, call, events, read } from "./api.js";
import * as bars from "./bars.js";
import { el } from "./dom.js";
import * as route from "./route.js";
import { count, time } from "./words.js";

const POLL_MS = 2000;

/** Pictures, each with previews on its way. */
export async function picture({ card, text, options, turn, signal, progress }) {
  const many = options.n ?? 1;
  const frames = Array.from({ length: many }, () => el("figure", { class: "picture" }, el("div", { class: "waiting" })));
  turn.put(el("div", { class: many > 1 ? "grid" : "single" }, ...frames));
  let timings = null, seeds = [];
  const response = await call("v1/images/generations", { signal, body: {
    model: card.id, prompt: text, stream: true, partial_images: 3, stream_options: { include_progress: true }, ...options,
  } });
  for await (const { data } of events(response)) {
    step(data, progress);
    if (data.b64_json) {
      const source = `data:image/${data.output_format};base64,${data.b64_json}`;
      const isDone = data.type === "image_generation.completed";
      shown(frames[data.index], source, text, isDone, data);
      if (isDone) { timings = data.timings ?? timings; seeds.push(data.seed); }
    }
  }
  progress("");
  turn.end([timings ? `${count(timings.steps, "step")}, ${time(timings.total_s)}` : "", `seed ${seeds.join(", ")}`], timings,
    response.headers.get("x-request-id"));
}

function shown(figure, source, prompt, isDone, data) {
  const image = el("img", { src: source, alt: isDone ? `Made of: ${prompt}` : "A preview", class: isDone ? "" : "preview" });
  const save = isDone ? el("figcaption", {}, el("a", { href: source, download: `diffuse-${data.seed}.${data.output_format}`, text: "Save" })) : null;
  figure.replaceChildren(image, ...(save ? [save] : []));
}

/** A sound, or a piece of music. */
export async function sound({ card, text, options, turn, signal, progress }) {
  turn.put(el("div", { class: "waiting line" }));
  const pieces = [];
  const response = await call("v1/audio/speech", { signal, body: {
    model: card.id, input: text, response_format: "mp3", stream_format: "sse", stream_options: { include_progress: true }, ...options,
  } });
  let seed = null;
  for await (const { data } of events(response)) {
    step(data, progress);
    if (data.audio) pieces.push(bytes(data.audio));
    if (data.type === "speech.audio.done") ({ seed } = data);
  }
  progress("");
  const url = URL.createObjectURL(new Blob(pieces, { type: "audio/mpeg" }));
  turn.put(el("audio", { src: url, controls: true, "aria-label": `Made of: ${text}` }),
    el("a", { href: url, download: `diffuse-${seed}.mp3`, text: "Save" }));
  turn.end([`seed ${seed}`], null, response.headers.get("x-request-id"));
}

/** A video: a job that goes on by itself; to stop it is to cancel it. */
export async function video({ card, text, options, turn, signal, progress }) {
  turn.put(el("div", { class: "waiting" }));
  let job = await read("v1/videos", { signal, body: { model: card.id, prompt: text, ...options } });
  const cancel = () => { call(`v1/videos/${job.id}`, { method: "DELETE" }).catch(() => {}); };
  signal.addEventListener("abort", cancel);
  try {
    for await (const { data } of events(await call(`v1/videos/${job.id}/events`, { signal }))) {
      job = data;
      progress(said(job));
    }
    while (!["completed", "failed"].includes(job.status)) { // the stream may have been cut by a proxy
      await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
      job = await read(`v1/videos/${job.id}`, { signal });
    }
    progress("");
    if (job.status === "failed") throw new Error(job.error?.message ?? "The video could not be made.");
    const film = await (await call(`v1/videos/${job.id}/content`, { signal })).blob();
    const url = URL.createObjectURL(film);
    turn.put(el("video", { src: url, controls: true, loop: true, "aria-label": `Made of: ${text}` }),
      el("a", { href: url, download: `diffuse-${job.seed}.mp4`, text: "Save" }));
    turn.end([`${job.seconds} s, ${job.size}`, `seed ${job.seed}`], null, null);
  } finally {
    signal.removeEventListener("abort", cancel);
  }
}

function said(job) {
  if (job.status === "queued") return "waits for its turn";
  return job.step ? `step ${job.step} of ${job.steps}` : "begins";
}

function step(data, progress) {
  if (!data.type?.endsWith(".progress") || !data.step || data.seconds === undefined) return;
  progress(`step ${data.step} of ${data.steps}`);
  const share = Math.min(1, (data.busy ?? []).reduce((sum, one) => sum + one, 0));
  bars.add({ compute_s: data.seconds * share, network_s: data.seconds * (1 - share) }, "step");
  route.busy(data.busy ?? []);
  route.pulse(1000 * data.seconds);
}
