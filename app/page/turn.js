// One thing said, by a person or by a model: its text, what was made, and underneath how it went.

import { read } from "./api.js";
import { byId, el, perFrame } from "./dom.js";
import { render } from "./markdown.js";
import { PARTS, share } from "./parts.js";
import { count, layers, time } from "./words.js";

const NEAR_END = 120; // pixels from the end within which the log follows what comes

/** Follow the end of the log, unless somebody scrolled away from it. */
export function following(log) {
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  return () => { if (isNear) log.scrollTop = log.scrollHeight; };
}

export function said(text, files = []) {
  const shown = files.map((file) => (file.kind === "image"
    ? el("img", { src: file.url, alt: file.name })
    : el("audio", { src: file.url, controls: true, "aria-label": file.name })));
  const turn = el("article", { class: "turn you" }, el("h3", { class: "hidden", text: "You" }),
    el("div", { class: "bubble" }, ...shown, text ? el("p", { text }) : null));
  show(turn);
  return turn;
}

function show(turn) {
  const log = byId("log");
  byId("welcome").hidden = true;
  log.append(turn);
  log.scrollTop = log.scrollHeight;
}

/** An answer under way; every method shows at once what it is told. */
export class Turn {
  constructor(model) {
    this.body = el("div", { class: "answer" });
    this.made = el("div", { class: "made" });
    this.foot = el("footer", { class: "foot" });
    this.element = el("article", { class: "turn reply", "aria-busy": "true" },
      el("h3", { class: "who", text: model }), this.body, this.made, this.foot);
    this.text = "";
    this.write = perFrame(() => {
      const follow = following(byId("log"));
      render(this.body, this.text);
      follow();
    });
    show(this.element);
  }

  add(text) {
    this.text += text;
    this.write();
  }

  /** Put something that was made under the text, in place of what was there before. */
  put(...nodes) {
    const follow = following(byId("log"));
    this.made.replaceChildren(...nodes);
    follow();
  }

  /** How it went: facts in words, the parts of its time, and what to look up. */
  end(facts, timings, requestId) {
    this.element.removeAttribute("aria-busy");
    this.write();
    const follow = following(byId("log"));
    const buttons = el("span", { class: "buttons" });
    if (this.text) buttons.append(copyButton(() => this.text));
    if (requestId) buttons.append(this.#details(requestId));
    this.foot.append(...(timings ? [bar(timings)] : []), el("span", { text: facts.filter(Boolean).join(" · ") }), buttons);
    follow();
  }

  fail(message) {
    this.element.removeAttribute("aria-busy");
    this.write();
    this.made.append(el("p", { class: "wrong", role: "alert", text: message }));
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  #details(requestId) {
    const place = el("div", { class: "details", hidden: true });
    const button = el("button", { type: "button", class: "quiet", text: "Where the time went", "aria-expanded": "false" });
    button.addEventListener("click", async () => {
      place.hidden = !place.hidden;
      button.setAttribute("aria-expanded", String(!place.hidden));
      if (place.hidden || place.childElementCount) return;
      try { place.append(table(await read(`v1/requests/${encodeURIComponent(requestId)}`))); }
      catch (error) { place.append(el("p", { class: "wrong", text: error.message })); }
      place.scrollIntoView({ block: "nearest" });
    });
    this.element.append(place);
    return button;
  }
}

function copyButton(textOf) {
  const button = el("button", { type: "button", class: "quiet", text: "Copy" });
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(textOf()); button.textContent = "Copied"; }
    catch { button.textContent = "Not allowed"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Compute against network, as one line of colours. */
export function bar(timings) {
  const shares = share(timings);
  const say = shares.map(({ part, percent }) => `${part.name} ${percent} %`).join(", ");
  const made = el("span", { class: "split", role: "img", "aria-label": say, title: say });
  for (const { part, percent } of shares) {
    const piece = el("i", { class: part.key });
    piece.style.width = `${percent}%`;
    made.append(piece);
  }
  return made;
}

function table(report) {
  const head = el("tr", {}, ...["Node", "Layers", ...PARTS.map((part) => part.name)].map((text) => el("th", { scope: "col", text })));
  const rows = report.answers.flatMap((answer) => [
    ...answer.hops.map((hop) => row(hop.node, layers(hop.layers), hop)),
    row("together", "", answer.timings),
  ]);
  const facts = [`${report.status}${report.error ? ` (${report.error})` : ""}`,
    report.took_s === null ? "" : `${time(report.took_s)} in all`,
    ...report.answers.map((answer) => (answer.replays ? count(answer.replays, "route rebuilt", "routes rebuilt") : ""))];
  return el("div", {}, el("p", { class: "soft", text: `${facts.filter(Boolean).join(" · ")} · ${report.id}` }),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Time by node" },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
}

function row(name, where, seconds) {
  const cells = PARTS.map((part) => {
    const value = seconds[`${part.key}_s`];
    return el("td", { text: value === undefined || value === null ? "–" : time(value) });
  });
  return el("tr", {}, el("th", { scope: "row", text: name }), el("td", { text: where.replace(/^layers? /, "") }), ...cells);
}
