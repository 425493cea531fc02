// The models of this gateway: which is asked, and how many nodes hold each of its layers.

import { byId, el } from "./dom.js";
import { count, does, layers, state } from "./words.js";

const DENSE = 64; // layers with a gap between them

let shown = "";

/** Show the cards; `replicas` and `home` are known of the chosen one. `choose(id)` is called when one is pressed. */
export function draw(cards, unserved, chosen, plan, choose) {
  const text = JSON.stringify([cards, unserved, chosen, plan?.model === chosen ? [plan.replicas, plan.home_layers] : null]);
  if (text === shown) return;
  shown = text;
  choices(cards, chosen);
  const list = byId("models");
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  list.replaceChildren(
    ...cards.map((card) => entry(card, card.id === chosen, plan?.model === card.id ? plan : null, choose)),
    ...unserved.map((one) => el("li", { class: "unserved" }, el("b", { text: one.id }), el("p", { class: "soft", text: `announced, not served: ${one.reason}` }))),
  );
  if (focused) [...list.querySelectorAll("button")].find((button) => button.dataset.id === focused)?.focus();
}

function choices(cards, chosen) {
  const select = byId("model");
  if (document.activeElement === select && select.options.length === cards.length && select.value === chosen) return;
  select.replaceChildren(...cards.map((card) => el("option", { value: card.id, selected: card.id === chosen,
    text: ["ready", "available"].includes(card.status) ? card.id : `${card.id} (${state(card)})` })));
  if (!cards.length) select.append(el("option", { text: "no model yet", value: "" }));
  select.disabled = !cards.length;
  if (chosen) select.value = chosen;
}

function entry(card, isChosen, plan, choose) {
  const button = el("button", { type: "button", class: "pick", data: { id: card.id }, "aria-pressed": String(isChosen), on: { click: () => choose(card.id) } },
    el("b", { text: card.id }), el("span", { class: `state ${card.status}`, text: state(card) }));
  return el("li", {}, button, el("p", { class: "soft", text: `${does(card)} · ${count(card.layers, "layer")}` }), strip(card, plan));
}

function strip(card, plan) {
  const kinds = Array.from({ length: card.layers }, (_, layer) => kindOf(layer, card, plan));
  const cells = kinds.map((kind, layer) => el("i", { class: kind, title: `layer ${layer}: ${nodes(layer, kind, plan)}` }));
  return el("div", { class: kinds.length > DENSE ? "strip dense" : "strip", role: "img", "aria-label": told(kinds) }, ...cells);
}

const nodes = (layer, kind, plan) => (kind === "more" ? count(plan.replicas[layer], "node") : NAMES[kind]);

const NAMES = { home: "at home", none: "no node", one: "one node", more: "several nodes", covered: "covered" };

function kindOf(layer, card, plan) {
  const lies = ([start, end]) => start <= layer && layer < end;
  if (card.missing_layers.some(lies)) return "none";
  if (!plan) return "covered";
  if (plan.home_layers.some(lies)) return "home";
  return plan.replicas[layer] > 1 ? "more" : plan.replicas[layer] === 1 ? "one" : "none";
}

function runs(kinds) {
  const found = [];
  kinds.forEach((kind, layer) => {
    if (found.at(-1)?.kind === kind) found.at(-1).end = layer + 1;
    else found.push({ kind, start: layer, end: layer + 1 });
  });
  return found;
}

const told = (kinds) => runs(kinds).map(({ kind, start, end }) => `${layers([start, end])}: ${NAMES[kind]}`).join("; ");
