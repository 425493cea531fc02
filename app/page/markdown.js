// What a model writes, as elements: paragraphs, headings, lists, quotes, code, emphasis, links.
// Everything becomes text nodes of elements made here; HTML in an answer is shown as it is written.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const MAX_DEPTH = 6;

/** Show `text` in `parent`; blocks that did not change keep their elements, and what is selected in them. */
export function render(parent, text) {
  const blocks = split(text);
  const held = [...parent.children];
  blocks.forEach((block, number) => {
    if (held[number]?.diffuseSource === block.source) return;
    const made = built(block);
    made.diffuseSource = block.source;
    if (held[number]) held[number].replaceWith(made);
    else parent.append(made);
  });
  held.slice(blocks.length).forEach((one) => one.remove());
}

// Blocks ----------------------------------------------------------------------------------------------------------

function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const from = at;
    const kind = kindOf(lines[at]);
    if (kind === "blank") { at += 1; continue; }
    at = END[kind](lines, at);
    const taken = lines.slice(from, at);
    blocks.push({ kind, lines: taken, source: kind + taken.join("\n") });
  }
  return blocks;
}

function kindOf(line) {
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  return ITEM.test(line) ? "list" : "text";
}

const while_ = (test) => (lines, at) => { do at += 1; while (at < lines.length && test(lines[at])); return at; };

const END = {
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: while_((line) => QUOTE.test(line)),
  list: while_((line) => ITEM.test(line) || /^\s{2,}\S/.test(line)),
  text: while_((line) => kindOf(line) === "text"),
  code(lines, at) {
    const mark = lines[at].match(FENCE)[1];
    for (let end = at + 1; end < lines.length; end += 1) {
      const line = lines[end].trim();
      if (line.startsWith(mark) && !line.replaceAll(mark[0], "")) return end + 1;
    }
    return lines.length; // not closed yet
  },
};

function built({ kind, lines }, depth = 0) {
  switch (kind) {
    case "heading": {
      const [, marks, title] = lines[0].match(HEADING);
      return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(title.replace(/\s#+\s*$/, "")));
    }
    case "rule": return el("hr");
    case "code": return code(lines);
    case "quote": {
      const inner = el("blockquote");
      const text = lines.map((line) => line.replace(QUOTE, "")).join("\n");
      if (depth < MAX_DEPTH) inner.append(...split(text).map((block) => built(block, depth + 1)));
      else inner.textContent = text;
      return inner;
    }
    case "list": return list(lines, depth);
    default: return el("p", {}, ...broken(lines));
  }
}

function code(lines) {
  const language = lines[0].match(FENCE)[2];
  const isClosed = lines.length > 1 && FENCE.test(lines.at(-1));
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = el("button", { type: "button", class: "quiet copy", text: "Copy", "aria-label": "Copy this code",
    on: { click: () => copied(copy, text) } });
  return el("div", { class: "code" }, el("div", { class: "code-bar" }, el("span", { text: language }), copy),
    el("pre", { tabindex: "0" }, el("code", { text })));
}

async function copied(button, text) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Not allowed"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function list(lines, depth) {
  const [, indent, mark] = lines[0].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const made = el(isOrdered ? "ol" : "ul", isOrdered && parseInt(mark, 10) !== 1 ? { start: parseInt(mark, 10) } : {});
  let held = null;
  const close = () => {
    if (!held) return;
    const inner = held.rest.length && depth < MAX_DEPTH ? split(dedented(held.rest)).map((one) => built(one, depth + 1)) : [];
    made.append(el("li", {}, ...inline(held.text), ...inner));
  };
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && (!held || item[1].length <= indent.length + 1)) {
      close();
      held = { text: item[3], rest: [] };
    } else held.rest.push(line);
  }
  close();
  return made;
}

function dedented(lines) {
  const least = Math.min(...lines.map((line) => line.match(/^ */)[0].length));
  return lines.map((line) => line.slice(least)).join("\n");
}

const broken = (lines) => lines.flatMap((line, number) => [...(number ? [el("br")] : []), ...inline(line.trim())]);

// Within a line ---------------------------------------------------------------------------------------------------

const SPANS = [
  [/\\([\\`*_{}[\]()#+.!~>-])/, (found) => found[1]],
  [/`([^`]+)`/, (found) => el("code", { text: found[1] })],
  [/\*\*(?=\S)(.+?)\*\*/, (found, depth) => el("strong", {}, ...inline(found[1], depth))],
  [/(?<![\w*])\*(?=[^\s*])([^*]+)\*(?!\*)/, (found, depth) => el("em", {}, ...inline(found[1], depth))],
  [/(?<!\w)_(?=[^\s_])([^_]+)_(?!\w)/, (found, depth) => el("em", {}, ...inline(found[1], depth))],
  [/~~(?=\S)(.+?)~~/, (found, depth) => el("s", {}, ...inline(found[1], depth))],
  [/!?\[([^\]]*)\]\((https?:\/\/[^\s)]+)\)/, (found) => link(found[1] || found[2], found[2])], // pictures are not fetched
  [/\bhttps?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?]/, (found) => link(found[0], found[0])],
];

function inline(text, depth = 0) {
  const parts = [];
  let rest = text;
  while (rest && depth < MAX_DEPTH) {
    let first = null;
    for (const [pattern, make] of SPANS) {
      const found = pattern.exec(rest);
      if (found && (!first || found.index < first.found.index)) first = { found, make };
    }
    if (!first) break;
    const { found, make } = first;
    if (found.index) parts.push(rest.slice(0, found.index));
    parts.push(make(found, depth + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) parts.push(rest);
  return parts;
}

const link = (text, href) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", text });
