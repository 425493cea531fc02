// The last tokens (or steps of a picture) as columns: what each of them took, and for what.

import { byId, el, perFrame, shape } from "./dom.js";
import { PARTS, share } from "./parts.js";
import { ms } from "./words.js";

const NUM_BARS = 48;
const WIDTH = 320, HEIGHT = 96, GAP = 1.5;

const drawn = []; // {parts, unit}

/** Add what one token took, in seconds by part. */
export function add(parts, unit = "token") {
  drawn.push({ parts, unit });
  if (drawn.length > NUM_BARS) drawn.shift();
  draw();
}

export function clear() {
  drawn.length = 0;
  draw();
}

const total = (parts) => PARTS.reduce((sum, { key }) => sum + (parts[`${key}_s`] ?? 0), 0);

const draw = perFrame(() => {
  const picture = byId("bars");
  picture.toggleAttribute("hidden", !drawn.length);
  // A long first one (the prompt, a route that was rebuilt) would flatten all others: it is cut.
  const totals = drawn.map(({ parts }) => total(parts)).sort((a, b) => a - b);
  const most = Math.max(1e-6, Math.min(totals.at(-1) ?? 0, 3 * (totals[Math.floor(totals.length / 2)] ?? 0)));
  const width = WIDTH / NUM_BARS;
  const made = drawn.flatMap(({ parts }, number) => column(parts, (NUM_BARS - drawn.length + number) * width, width - GAP, most));
  picture.replaceChildren(shape("line", { class: "ground", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), ...made);
  say();
});

function column(parts, x, width, most) {
  const scale = Math.min(HEIGHT / most, HEIGHT / Math.max(1e-9, total(parts)));
  let y = HEIGHT;
  return PARTS.flatMap(({ key }) => {
    const height = (parts[`${key}_s`] ?? 0) * scale;
    if (height <= 0) return [];
    y -= height;
    return [shape("rect", { class: key, x, y, width, height })];
  });
}

function say() {
  if (!drawn.length) {
    byId("bars-say").textContent = "Nothing was answered yet.";
    return;
  }
  const sum = {};
  for (const { parts } of drawn) for (const { key } of PARTS) sum[`${key}_s`] = (sum[`${key}_s`] ?? 0) + (parts[`${key}_s`] ?? 0);
  const each = share(sum).map(({ part, seconds }) => `${part.name} ${ms((1000 * seconds) / drawn.length)}`);
  byId("bars-say").textContent = `A ${drawn.at(-1).unit}: ${each.join(", ")}.`;
}

export function legend() {
  byId("legend").replaceChildren(...PARTS.map(({ key, name }) => el("li", { class: key, text: name })));
}
