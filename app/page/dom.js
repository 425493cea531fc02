// Elements made of data. Text is only ever set as text: nothing here reads HTML.

export const byId = (id) => document.getElementById(id);

/** Make an element. `on` holds listeners, `data` its dataset, anything else is an attribute (false: left out). */
export function el(tag, { on = {}, data = {}, text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, attributes);
  Object.assign(made.dataset, data);
  for (const [name, listener] of Object.entries(on)) made.addEventListener(name, listener);
  if (text !== undefined) made.textContent = text;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Make an element of a drawing. */
export function shape(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(made, attributes);
  return made;
}

function fill(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
}

/** Call at most once a frame, with what was said last. */
export function perFrame(work) {
  let waiting = null;
  return (...said) => {
    if (waiting === null) requestAnimationFrame(() => { const now = waiting; waiting = null; work(...now); });
    waiting = said;
  };
}
