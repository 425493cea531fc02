// Files for the next message: pressed, dropped or pasted. Bounded, looked at here, sent only with the message.

import { byId, el } from "./dom.js";
import { count } from "./words.js";

const MAX_BYTES = 20 << 20; // of one file in a chat: as base64 it has to fit the gateway's 32 MiB
const MAX_FILES = 8;

let accepted = { image: false, audio: false, isForm: false };
let held = []; // {file, kind, name, url}
let tell = () => {};

/** Take pictures and recordings from now on as the mode wants them; `say` shows why one was not taken. */
export function accept(kinds, say) {
  accepted = kinds;
  tell = say;
  const types = [kinds.image && "image/*", kinds.audio && (kinds.isForm ? "audio/*,video/*" : ".wav,.mp3,audio/wav,audio/mpeg")];
  byId("files").accept = types.filter(Boolean).join(",");
  byId("files").multiple = !kinds.isForm;
  byId("attach").hidden = !(kinds.image || kinds.audio);
  byId("attach").textContent = kinds.isForm ? "Choose a recording" : kinds.image && kinds.audio ? "Attach" : kinds.image ? "Add a picture" : "Add a recording";
  for (const one of [...held]) if (!accepted[one.kind]) remove(one);
}

/** Take what is held, and hold nothing. */
export function taken() {
  const files = held;
  held = [];
  draw();
  return files;
}

export const number = () => held.length;

function take(files) {
  for (const file of files) {
    const kind = file.type.startsWith("image/") ? "image" : /^(audio|video)\//.test(file.type) ? "audio" : null;
    if (!kind || !accepted[kind]) tell(`This model does not take ${file.name || "that"}.`);
    else if (!accepted.isForm && file.size > MAX_BYTES) tell(`${file.name} is larger than 20 MB.`);
    else if (!accepted.isForm && kind === "audio" && !wavOrMp3(file)) tell(`${file.name}: recordings are WAV or MP3 here.`);
    else if (!accepted.isForm && held.length >= MAX_FILES) tell(`At most ${count(MAX_FILES, "file")} go with one message.`);
    else {
      if (accepted.isForm) held.forEach(forget);
      if (accepted.isForm) held = [];
      held.push({ file, kind, name: file.name || kind, url: URL.createObjectURL(file) });
    }
  }
  draw();
}

export const wavOrMp3 = (file) => (/wav/.test(file.type) ? "wav" : /mpeg|mp3/.test(file.type) ? "mp3" : null);

/** A file as base64, without the head of its data: URI. */
export function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

const forget = (one) => URL.revokeObjectURL(one.url);

function remove(one) {
  forget(one);
  held = held.filter((other) => other !== one);
  draw();
}

function draw() {
  byId("chips").replaceChildren(...held.map((one) => el("li", {},
    one.kind === "image" ? el("img", { src: one.url, alt: "" }) : el("span", { class: "note", text: "♪", "aria-hidden": "true" }),
    el("span", { text: one.name }),
    el("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.name}`, text: "×", on: { click: () => { remove(one); byId("prompt").focus(); } } }))));
}

/** Listen to the button, to files that are dropped, and to what is pasted. */
export function listen() {
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; byId("prompt").focus(); });
  byId("prompt").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
}
