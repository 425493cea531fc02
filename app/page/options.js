// What may be set for the next request; which fields there are depends on what the model makes.

import { byId, el } from "./dom.js";

const SEED = { name: "seed", label: "Seed", type: "number", min: 0, step: 1 };
const STEPS = { name: "steps", label: "Steps", type: "number", min: 1, max: 1000, step: 1 };
const SIZE = { name: "size", label: "Size", type: "text", placeholder: "auto", pattern: "auto|[0-9]+x[0-9]+" };
const LENGTH = { name: "seconds", label: "Seconds", type: "number", min: 0.1, step: 0.1 };
const FIELDS = {
  chat: [
    { name: "temperature", label: "Temperature", type: "number", min: 0, max: 2, step: 0.1 },
    { name: "max_tokens", label: "Longest answer", type: "number", min: 1, step: 1 },
    SEED,
    { name: "system", label: "Instructions", type: "text", isWide: true },
  ],
  picture: [SIZE, STEPS, SEED, { name: "n", label: "Pictures", type: "number", min: 1, max: 10, step: 1 }],
  video: [SIZE, LENGTH, STEPS, SEED],
  sound: [LENGTH, STEPS, SEED],
  transcript: [{ name: "language", label: "Language", type: "text", placeholder: "as it is spoken" }],
  vectors: [],
};

const kept = new Map(); // by mode and name: switching models and back loses nothing

/** Show the fields of a mode. */
export function show(mode) {
  const fields = FIELDS[mode].map(({ name, label, isWide, ...attributes }) => {
    const id = `option-${name}`;
    const input = el("input", { id, ...attributes, on: { input: () => kept.set(`${mode}.${name}`, input.value) } });
    input.value = kept.get(`${mode}.${name}`) ?? "";
    return el("div", { class: isWide ? "field wide" : "field" }, el("label", { for: id, text: label }), input);
  });
  byId("options").replaceChildren(...fields);
  byId("show-options").hidden = !fields.length;
  if (!fields.length) toggle(false);
}

export function toggle(isOpen) {
  byId("options").hidden = !isOpen;
  byId("show-options").setAttribute("aria-expanded", String(isOpen));
}

/** What is filled in, numbers as numbers. */
export function chosen(mode) {
  const found = {};
  for (const { name, type } of FIELDS[mode]) {
    const text = (kept.get(`${mode}.${name}`) ?? "").trim();
    if (text) found[name] = type === "number" ? Number(text) : text;
  }
  return found;
}
