// The gateway's API: one call, streams as events, failures in words. The key lives in this tab.

const KEY = "diffuse.key";
const RETRIES = { 503: true, 429: true };

let askForKey = async () => null;

/** Say who asks for a key where the gateway wants one; `ask(isWrong)` returns it, or null. */
export function onKey(ask) { askForKey = ask; }
export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY));

/** A request that failed; `message` is for people. */
export class Failure extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Send a request; `body` is an object (sent as JSON) or a form. Throws Failure, or AbortError when stopped. */
export async function call(path, { method, body, signal, asksKey = true } = {}) {
  const response = await sent(path, { method, body, signal });
  if (response.ok) return response;
  if (response.status === 401 && asksKey) {
    const given = await askForKey(key() !== "");
    if (given) {
      setKey(given);
      return call(path, { method, body, signal });
    }
  }
  throw await failed(response);
}

export const read = async (path, options) => (await call(path, options)).json();

async function sent(path, { method, body, signal }) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["content-type"] = "application/json";
  const content = body && !isForm ? JSON.stringify(body) : body;
  try {
    return await fetch(new URL(path, document.baseURI), {
      method: method ?? (body ? "POST" : "GET"), headers, body: content, signal, cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The gateway does not answer. Is it still running?");
  }
}

async function failed(response) {
  let told = null;
  try { told = (await response.json()).error; } catch { /* no envelope: a proxy's page */ }
  const after = response.headers.get("retry-after");
  const again = RETRIES[response.status] && after ? ` Try again in ${after} s.` : "";
  return new Failure(sentence(told?.message ?? `The gateway answered ${response.status}.`) + again,
    { status: response.status, code: told?.code });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** The events of a stream, as {name, data}; ends with the stream. Throws Failure where an event is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await piece(reader);
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event === null) continue;
        if (event.data.error) throw new Failure(sentence(event.data.error.message), { code: event.data.error.code });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function piece(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection to the gateway broke.");
  }
}

function parsed(block) {
  let name = "message", data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data === "" || data === "[DONE]" ? null : { name, data: JSON.parse(data) };
}

/** The bytes of base64. */
export function bytes(text) {
  const raw = atob(text);
  return Uint8Array.from(raw, (one) => one.charCodeAt(0));
}
