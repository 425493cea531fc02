// What a model is asked for, by what it takes and makes: who answers, and how the page speaks of it.

import { answer } from "./chat.js";
import { transcript, vectors } from "./listening.js";
import { picture, sound, video } from "./making.js";

export const MODES = {
  chat: {
    run: answer, label: "Your message", placeholder: "Ask something", send: "Send",
    title: "Ask your swarm",
    tries: ["Name three rivers of Europe.", "Explain a black hole to a child.", "Write a haiku about the sea."],
  },
  picture: {
    run: picture, label: "What the picture shows", placeholder: "Describe a picture", send: "Draw",
    title: "Draw with your swarm",
    tries: ["a large red circle on a blue background", "a small green square on a white background", "a yellow triangle on a black background"],
  },
  video: {
    run: video, label: "What the video shows", placeholder: "Describe a video", send: "Film",
    title: "Film with your swarm", tries: ["waves on a beach at dusk", "a red circle that grows"],
  },
  sound: {
    run: sound, label: "What it sounds like", placeholder: "Describe a sound", send: "Play",
    title: "Make a sound", tries: ["rain on a roof", "a calm piano melody", "drums that become faster"],
  },
  transcript: {
    run: transcript, label: "Names and spellings, if there are some", placeholder: "Names and spellings (optional)", send: "Write down",
    title: "Write down a recording", tries: [], needsFile: true,
  },
  vectors: {
    run: vectors, label: "Texts, one on each line", placeholder: "One text on each line", send: "Compare",
    title: "Compare texts", tries: ["A cat sleeps on the sofa.\nA kitten naps on the couch.\nShares fell on Monday."],
  },
};

const BY_OUTPUT = { image: "picture", video: "video", audio: "sound", embeddings: "vectors" };

/** The name of a model's mode, by its card. */
export function modeOf(card) {
  const { input_modalities: takes, output_modalities: makes } = card.architecture;
  return takes.includes("text") ? BY_OUTPUT[makes[0]] ?? "chat" : "transcript";
}
