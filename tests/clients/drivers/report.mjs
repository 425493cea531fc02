// What a driver in JavaScript tells: as report.py does.
const env = process.env;
export const BASE_URL = env.BASE_URL ?? "";
export const API_KEY = env.API_KEY ?? "";
export const MODEL = env.MODEL ?? "";
export const IS_SCRIPTED = env.SCRIPTED === "1";
export const HELLO = "Hello";
export const ANSWER = "Hello! This answer follows a script, so that you can rely on it.";
export const UNICODE = "Größe 日本語 👩‍👩‍👧 🎉 naïve";
export const WEATHER = "What is the weather in Paris?";
export const WEATHERS = "What is the weather in Paris and in Rome?";
export const PERSON = "The name is Ada, her age is 36.";
export const TOO_LONG = "word ".repeat(20000);
export const PERSON_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", maximum: 150 } },
  required: ["name", "age"],
  additionalProperties: false,
};
export const TOOL = {
  name: "get_weather",
  description: "Tell the weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 } },
    required: ["city"],
    additionalProperties: false,
  },
};
const only = new Set((env.ONLY ?? "").split(",").filter(Boolean));

export class Skipped extends Error {}

export async function tried(behaviour, run) {
  if (only.size && !only.has(behaviour)) return;
  let told = { behaviour, status: "pass", why: "" };
  try {
    await run();
  } catch (error) {
    const status = error instanceof Skipped ? "skip" : "fail";
    if (env.VERBOSE) console.error(error);
    told = { behaviour, status, why: `${error?.name}: ${error?.message ?? error}`.slice(0, 400) };
    if (status === "skip") told.why = error.message;
  }
  console.log(JSON.stringify(told));
}

export function same(found, wanted, what = "") {
  const [left, right] = [JSON.stringify(found), JSON.stringify(wanted)];
  if (left !== right) throw new Error(`${what} ${left} instead of ${right}`);
}

export function check(claim, what) {
  if (!claim) throw new Error(what);
}

export function answered(text, wanted = ANSWER) {
  check(typeof text === "string" && text.trim(), `no text: ${JSON.stringify(text)}`);
  if (IS_SCRIPTED) same(text, wanted);
}

export function isPerson(value) {
  same(Object.keys(value).sort(), ["age", "name"]);
  check(typeof value.name === "string" && Number.isInteger(value.age), JSON.stringify(value));
  if (IS_SCRIPTED) same([value.name, value.age], ["Ada", 36]);
}

export function areCalls(calls, ...cities) {
  check(calls.length > 0, "no calls");
  for (const [name, args] of calls) {
    same(name, "get_weather");
    same(Object.keys(args), ["city"]);
  }
  if (IS_SCRIPTED) same(calls.map(([, args]) => args.city), cities);
}

export const isTold = (text) => answered(text, "The tools said: sunny");

export function needsScript(why = "what a model writes cannot be foreseen") {
  if (!IS_SCRIPTED) throw new Skipped(why);
}

export function needsKey() {
  if (!API_KEY || API_KEY === "none") throw new Skipped("this gateway has no key");
}

export async function modelFor(modality, takes = "text") {
  const reply = await fetch(`${BASE_URL}/models`, { headers: { Authorization: `Bearer ${API_KEY}` } });
  for (const card of (await reply.json()).data) {
    const { output_modalities: makes, input_modalities: reads } = card.architecture;
    if (makes.includes(modality) && reads.includes(takes)) return card.id;
  }
  throw new Skipped(`no model here makes ${modality} of ${takes}`);
}

export async function fails(run) {
  try {
    await run();
  } catch (error) {
    return error;
  }
  throw new Error("no error");
}

// A second of silence as a WAV file.
export function aRecording() {
  const file = Buffer.alloc(44 + 32000);
  file.write("RIFF", 0);
  file.writeUInt32LE(36 + 32000, 4);
  file.write("WAVEfmt ", 8);
  file.writeUInt32LE(16, 16);
  file.writeUInt16LE(1, 20);
  file.writeUInt16LE(1, 22);
  file.writeUInt32LE(16000, 24);
  file.writeUInt32LE(32000, 28);
  file.writeUInt16LE(2, 32);
  file.writeUInt16LE(16, 34);
  file.write("data", 36);
  file.writeUInt32LE(32000, 40);
  return file;
}
