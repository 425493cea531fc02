// What an answer's time is made of. Keys are those of the API's timings, without `_s`, and the colours' classes.

export const PARTS = [
  { key: "compute", name: "compute" },
  { key: "network", name: "network" },
  { key: "queue", name: "queue" },
  { key: "crypto", name: "encryption" },
  { key: "local", name: "this gateway" },
];

/** The parts of a record of seconds that are there, with whole percents of their sum. */
export function share(timings) {
  const found = PARTS.map((part) => ({ part, seconds: timings[`${part.key}_s`] ?? 0 })).filter(({ seconds }) => seconds > 0);
  const whole = found.reduce((sum, { seconds }) => sum + seconds, 0);
  return found.map(({ part, seconds }) => ({ part, seconds, percent: Math.round((100 * seconds) / whole) }));
}

/** What was added between two records of the same answer, for each of `num` tokens. */
export function between(before, after, num) {
  const each = {};
  for (const { key } of PARTS) each[`${key}_s`] = Math.max(0, ((after[`${key}_s`] ?? 0) - (before?.[`${key}_s`] ?? 0)) / num);
  return each;
}
