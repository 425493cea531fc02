// llama.cpp as the other side of a comparison: a line of JSON in, a line of JSON out (see bench/peers.py).
//
//   node bench/llama_peer.mjs FOLDER_OF_NODE_MODULES MODEL.gguf THREADS MAX_SESSIONS
//   {"decode": {"sessions": 4, "past": 128, "tokens": 32}} -> {"seconds": ...}   all sessions at once, prompts not counted
//   {"prefill": {"rows": 512}}                             -> {"seconds": ...}
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [folder, modelPath, threads, maxSessions] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(folder + "/")).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);

const CONTEXT = 1024; // positions of one session
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const context = await model.createContext({
    contextSize: CONTEXT, sequences: Number(maxSessions), batchSize: 512, threads: Number(threads),
});
const sequences = Array.from({ length: Number(maxSessions) }, () => context.getSequence());

function* someTokens(count, seed) {
    for (let i = 0; i < count; i++) yield 100 + ((seed * 7919 + i * 104729) % 20000);
}

async function decode({ sessions, past, tokens }) {
    const used = sequences.slice(0, sessions);
    for (const sequence of used) await sequence.clearHistory();
    await Promise.all(used.map((one, i) => one.evaluateWithoutGeneratingNewTokens([...someTokens(past, i)])));
    const begun = performance.now();
    await Promise.all(used.map(async (one) => {
        let count = 0;
        for await (const _ of one.evaluate([42], { temperature: 0 })) if (++count === tokens) break;
    }));
    return (performance.now() - begun) / 1000;
}

async function prefill({ rows }) {
    await sequences[0].clearHistory();
    const begun = performance.now();
    await sequences[0].evaluateWithoutGeneratingNewTokens([...someTokens(rows, 1)]);
    return (performance.now() - begun) / 1000;
}

const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");
answer({ ready: true, threads: context.currentThreads, ideal: context.idealThreads });
for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    answer({ seconds: request.decode ? await decode(request.decode) : await prefill(request.prefill) });
}
process.exit(0);
