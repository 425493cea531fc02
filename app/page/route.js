// The route that the next request would take, as a line with its stations, and what travels on it while it does.

import { Failure, read } from "./api.js";
import { byId, el } from "./dom.js";
import { count, layers, ms } from "./words.js";

const SEES = {
  hidden_states: "hidden states",
  encoder_states: "encoder states",
  prompt_embeddings: "prompt embeddings",
  token_ids: "token ids",
  answer: "the answer",
  answer_length: "the answer's length",
};
const TRIP_MS = [350, 1600]; // a packet slower than the eye follows, or faster, is shown at these
const still = matchMedia("(prefers-reduced-motion: reduce)");

let shown = "";
let trip = null;

/** Ask for the route of a model and show it. Returns the report; null where there is none. */
export async function refresh(model) {
  let report = null;
  try {
    report = await read(`v1/route?model=${encodeURIComponent(model)}`, { asksKey: false });
    draw(report);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    nothing(error.message);
  }
  return report;
}

/** Say that there is no route, and why. */
export function nothing(why) {
  shown = "";
  byId("route").replaceChildren();
  byId("privacy").textContent = "";
  byId("route-says").textContent = why;
}

/** Show how busy each station is, as shares of the time; [] takes that away. */
export function busy(shares) {
  const stations = byId("route").querySelectorAll(".node");
  stations.forEach((station, number) => {
    const fill = station.querySelector(".load i");
    if (shares[number] !== undefined) fill.style.width = `${Math.round(100 * shares[number])}%`;
  });
}

/** A token goes round: once at a time, in about the time that it takes. */
export function pulse(tripMs) {
  const line = byId("route"), packet = line.querySelector(".packet");
  if (still.matches || trip || !packet || !line.offsetParent) return;
  const dots = [...line.querySelectorAll(".station .dot")];
  const tops = dots.map((dot) => dot.getBoundingClientRect().top - line.getBoundingClientRect().top);
  const there = tops.map((top) => ({ transform: `translateY(${top}px)`, opacity: 1 }));
  const duration = Math.min(TRIP_MS[1], Math.max(TRIP_MS[0], tripMs));
  trip = packet.animate([...there, { ...there.at(-1), opacity: 0 }], { duration, easing: "linear" });
  dots.slice(1, -1).forEach((dot, number) => {
    dot.animate([{ scale: 1 }, { scale: 1.5 }, { scale: 1 }], { duration: 260, delay: (duration * (number + 1)) / dots.length });
  });
  trip.onfinish = trip.oncancel = () => { trip = null; };
}

function draw(report) {
  const text = JSON.stringify(report);
  if (text === shown) return;
  shown = text;
  const slowest = Math.max(...report.hops.map((hop) => hop.token_ms ?? 0), 1e-9);
  const begin = home(report, "begin"), end = report.hops.length ? home(report, "end") : null;
  byId("route").replaceChildren(begin, ...report.hops.map((hop, number) => station(hop, report.hops[number - 1], slowest, unit(report))),
    ...(end ? [end, el("li", { class: "packet", "aria-hidden": "true" })] : []));
  const expected = report.expected_ms === null || !report.hops.length ? "" : `, about ${ms(report.expected_ms)} a ${unit(report)}`;
  byId("route-says").textContent = report.hops.length
    ? `${count(report.hops.length, "hop")}${expected}.`
    : "No node is needed.";
  byId("privacy").textContent = report.privacy.statement;
}

const unit = (report) => (["picture", "video", "audio"].includes(report.kind) ? "pass" : "token");

function home(report, side) {
  const isBegin = side === "begin";
  const parts = report.home_layers.filter(([start]) => (start === 0) === isBegin || !report.hops.length).map(layers);
  const others = isBegin ? report.privacy.stays_home.slice(0, 2) : report.privacy.stays_home.slice(2);
  const does = [...others, ...parts].join(", ");
  return el("li", { class: "station gateway" }, el("span", { class: "dot", "aria-hidden": "true" }),
    el("div", { class: "about" }, el("b", { text: isBegin ? "This gateway" : "Back here" }),
      does ? el("p", { class: "soft", text: does }) : null));
}

function station(hop, before, slowest, one) {
  const fill = el("i");
  fill.style.width = `${Math.max(2, Math.round((100 * (hop.token_ms ?? 0)) / slowest))}%`;
  const took = hop.token_ms === null ? "not measured yet" : `${ms(hop.token_ms)} a ${one}${hop.is_measured ? "" : ", as it claims"}`;
  const stack = hop.stack && hop.stack !== before?.stack ? `${hop.stack.split(".")[0]}: ` : "";
  return el("li", { class: `station node ${hop.path}` }, el("span", { class: "dot", "aria-hidden": "true" }),
    el("div", { class: "about" },
      el("p", { class: "name" }, el("b", { text: hop.node }),
        el("span", { class: "badge", text: hop.rtt_ms === null ? hop.path : `${hop.path} · ${ms(hop.rtt_ms)}` })),
      el("p", { class: "soft", text: `${stack}${layers(hop.layers)} · ${hop.form}` }),
      el("div", { class: "load", "aria-hidden": "true" }, fill),
      el("p", { class: "soft", text: took, title: `${ms(hop.layer_ms)} a layer` }),
      el("p", { class: "sees", title: hop.statement, text: `sees ${hop.sees.map((sight) => SEES[sight] ?? sight).join(", ")}` })));
}
