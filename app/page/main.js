// The page: looks at the swarm every few seconds, takes what is asked, and lets one answer run at a time.

import { Failure, key, onKey, read, setKey } from "./api.js";
import * as attachments from "./attachments.js";
import * as bars from "./bars.js";
import * as chat from "./chat.js";
import { byId, el } from "./dom.js";
import * as models from "./models.js";
import { MODES, modeOf } from "./modes.js";
import * as options from "./options.js";
import * as route from "./route.js";
import { said, Turn } from "./turn.js";
import { trouble } from "./words.js";

const LOOK_MS = 4000;
const SAY_MS = 6000;
const READY = ["ready", "available", "loading"];

const page = { cards: [], unserved: [], chosen: "", plan: null, mode: "chat", running: null, said: "", saidUntil: 0 };
const card = () => page.cards.find((one) => one.id === page.chosen);

// Looking -----------------------------------------------------------------------------------------------------------

async function look({ asksKey = false } = {}) {
  try {
    const list = await read("v1/models", { asksKey });
    page.cards = list.data;
    page.unserved = list.unserved ?? [];
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    byId("key").hidden = byId("key").hidden && error.status !== 401;
    notice(error.status === 401 ? "This gateway asks for an API key: press Key." : error.message);
    return;
  }
  if (!card()) choose(best()?.id ?? "");
  await lookAtRoute();
  show();
}

const best = () => page.cards.find((one) => ["ready", "available"].includes(one.status)) ?? page.cards[0];

async function lookAtRoute() {
  const asked = card();
  if (!asked) route.nothing("No model is served yet.");
  else if (!READY.includes(asked.status)) { page.plan = null; route.nothing("There is no whole route now."); }
  else {
    const plan = await route.refresh(asked.id);
    if (asked.id === page.chosen) page.plan = plan;
  }
}

function show() {
  models.draw(page.cards, page.unserved, page.chosen, page.plan, (id) => { choose(id); look(); byId("prompt").focus(); });
  const anyway = card() ? trouble(card()) : "No model is served yet. Start a node: diffuse host --model smollm2";
  notice(performance.now() < page.saidUntil ? page.said : anyway);
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden) await look().catch(console.error);
    await new Promise((resolve) => { setTimeout(resolve, page.running ? 2 * LOOK_MS : LOOK_MS); });
  }
}

// Choosing ----------------------------------------------------------------------------------------------------------

function choose(id) {
  if (id === page.chosen && id) return;
  page.chosen = id;
  page.plan = null;
  const chosen = card();
  setMode(chosen ? modeOf(chosen) : "chat");
  const takes = chosen?.architecture.input_modalities ?? ["text"];
  const isForm = page.mode === "transcript";
  attachments.accept({ image: takes.includes("image"), audio: takes.includes("audio"), isForm }, say);
  show();
}

function setMode(name) {
  page.mode = name;
  const mode = MODES[name];
  byId("prompt").placeholder = mode.placeholder;
  byId("prompt-label").textContent = mode.label;
  byId("hint").hidden = name === "vectors";
  byId("send").textContent = mode.send;
  const title = ["picture", "video", "sound"].includes(name) ? "Time per step" : "Time per token";
  if (byId("tokens-title").textContent !== title) bars.clear(); // columns of one kind only
  byId("tokens-title").textContent = title;
  options.show(name);
  welcome(mode);
}

function welcome({ title, tries }) {
  byId("welcome").replaceChildren(el("h1", { text: title }),
    el("p", { class: "soft", text: "What you ask goes through the nodes on the route and comes back here." }),
    el("div", { class: "tries" }, ...tries.map((text) => el("button", { type: "button", text, on: { click: () => {
      byId("prompt").value = text;
      grow();
      byId("prompt").focus();
    } } }))));
}

// Asking ------------------------------------------------------------------------------------------------------------

async function ask() {
  const mode = MODES[page.mode], asked = card(), prompt = byId("prompt");
  const text = prompt.value.trim();
  if (page.running || !asked) return;
  if (mode.needsFile ? !attachments.number() : !text && !attachments.number()) {
    if (mode.needsFile) byId("attach").focus();
    return;
  }
  const files = attachments.taken();
  prompt.value = "";
  grow();
  said(text, files);
  const turn = new Turn(asked.id);
  const running = new AbortController();
  setRunning(running);
  try {
    await mode.run({ card: asked, text, files, options: options.chosen(page.mode), turn, signal: running.signal, progress });
  } catch (error) {
    if (error.name === "AbortError") turn.end(["stopped"], null, null);
    else {
      if (!(error instanceof Failure)) console.error(error);
      turn.fail(error.message);
    }
  } finally {
    setRunning(null);
    progress("");
    look().catch(console.error);
  }
}

function setRunning(running) {
  const hadFocus = [byId("stop"), byId("send")].includes(document.activeElement);
  page.running = running;
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  if (hadFocus) byId("prompt").focus();
}

const progress = (text) => { byId("progress").textContent = text; };

/** Say something for a moment, over what there is to say anyway. */
function say(text) {
  page.said = text;
  page.saidUntil = performance.now() + SAY_MS;
  notice(text);
}

function notice(text) {
  byId("notice").hidden = !text;
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
}

function grow() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function fresh() {
  page.running?.abort();
  chat.forget();
  bars.clear();
  byId("log").replaceChildren(byId("welcome"));
  byId("welcome").hidden = false;
  byId("prompt").focus();
}

// The key -----------------------------------------------------------------------------------------------------------

function askForKey(isWrong) {
  const dialog = byId("key-dialog");
  byId("key").hidden = false;
  byId("key-wrong").textContent = isWrong ? "The key that was given is not one of this gateway's." : "";
  byId("key-field").value = "";
  if (!dialog.open) dialog.showModal();
  byId("key-field").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" ? byId("key-field").value.trim() : null), { once: true });
  });
}

async function changeKey() {
  const given = await askForKey(false);
  if (given !== null) setKey(given);
  await look({ asksKey: given !== null });
}

// Beginning ---------------------------------------------------------------------------------------------------------

function listen() {
  const prompt = byId("prompt");
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  byId("stop").addEventListener("click", () => page.running?.abort());
  byId("fresh").addEventListener("click", fresh);
  byId("key").addEventListener("click", changeKey);
  byId("key-field").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); byId("key-use").click(); } // not the first button, which cancels
  });
  byId("model").addEventListener("change", (event) => { choose(event.target.value); look(); });
  byId("show-options").addEventListener("click", () => options.toggle(byId("options").hidden));
  byId("show-swarm").addEventListener("click", () => toggleSwarm(!document.body.classList.contains("swarm-open")));
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (sends && (page.mode !== "vectors" || event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("key-dialog").open) return;
    if (page.running) page.running.abort();
    else if (document.body.classList.contains("swarm-open")) { toggleSwarm(false); byId("show-swarm").focus(); }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look().catch(console.error); });
  attachments.listen();
}

function toggleSwarm(isOpen) {
  document.body.classList.toggle("swarm-open", isOpen);
  byId("show-swarm").setAttribute("aria-expanded", String(isOpen));
  byId("show-swarm").textContent = isOpen ? "Back" : "Route";
}

async function begin() {
  onKey(askForKey);
  byId("key").hidden = !key();
  bars.legend();
  setMode("chat");
  listen();
  if (matchMedia("(min-width: 60rem)").matches) byId("prompt").focus();
  await look({ asksKey: true }).catch(console.error);
  await keepLooking();
}

begin();
