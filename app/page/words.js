// Numbers and layers as people read them.

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function time(seconds) {
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return ms(seconds * 1000);
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 10) return `${Math.round(value)} ms`;
  if (value >= 0.095) return `${value.toFixed(1)} ms`;
  return value > 0 ? "under 0.1 ms" : "0 ms";
}

/** Layers [start, end), the way they are written on the command line. */
export const layers = ([start, end]) => (end - start === 1 ? `layer ${start}` : `layers ${start}–${end - 1}`);

const MAKES = { text: "text", image: "pictures", video: "videos", audio: "sounds", embeddings: "vectors" };

/** What a model does, by its card: "pictures", "text, sees pictures". */
export function does(card) {
  const { input_modalities: takes, output_modalities: makes } = card.architecture;
  if (!takes.includes("text")) return "writes down recordings";
  const senses = [takes.includes("image") && "sees pictures", takes.includes("audio") && "hears recordings"];
  return [makes.map((one) => MAKES[one] ?? one).join(", "), ...senses.filter(Boolean)].join(", ");
}

const STATES = {
  ready: "ready",
  available: "opens at the first question",
  loading: "is being loaded",
  partial: "layers are missing",
  failed: "cannot be opened",
};
export const state = (card) => STATES[card.status] ?? card.status;

/** Why a model cannot answer now; empty where it can. */
export function trouble(card) {
  if (card.status === "failed") return card.reason ?? "This model cannot be opened here.";
  if (card.status !== "partial") return "";
  const missing = card.missing_layers.map(layers).join(", ");
  const why = missing ? `No node serves ${missing}.` : "No route is whole.";
  return [why, card.reason].filter(Boolean).join(" ");
}
