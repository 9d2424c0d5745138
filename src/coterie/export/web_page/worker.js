// The models, off the page's own thread, so that it answers keys while they compute.
//
// It hears {id, text, message, clients}: what was written, of a chat to answer which message, and
// whose words are wanted; a later one takes the place of an earlier one. It says {kind: "loading",
// here, all} in bytes, {kind: "words", id, client, words}, {kind: "done", id} and {kind: "failed",
// problem}.

import { Folder } from "./files.js";
import { Model } from "./model.js";
import * as ort from "./ort.wasm.bundle.min.js";
import { strip } from "./search.js";
import { Texts, opening } from "./texts.js";
import { Tokenizer } from "./tokenizers.min.js";
import { Words } from "./words.js";

const WASM = "ort-wasm-simd-threaded.wasm.gz";
const folder = new Folder(import.meta.url, (here, all) => {
  self.postMessage({ kind: "loading", here, all });
});
const tensors = new Map(); // of each client's file, as promises
const models = new Map();
const pause = new MessageChannel();
let wanted = null;
let working = false;

const ready = load();
ready.catch(failed);

self.onmessage = ({ data }) => {
  wanted = data;
  if (!working) work().catch(failed);
};

async function load() {
  const page = await folder.json("page.json");
  const [graph, weights] = page.base;
  const chosen = page.clients.filter(({ chosen }) => chosen).map(({ file }) => tensorsOf(file));
  const [tokens, settings, binary, base, data] = await Promise.all([
    folder.json("tokenizer.json"),
    folder.json("tokenizer_config.json"),
    folder.bytes(WASM),
    folder.bytes(graph),
    folder.bytes(weights),
    ...chosen,
  ]);
  const texts = new Texts(Tokenizer, tokens, settings, page.texts);
  checkTokens(texts, page);
  ort.env.wasm.numThreads = 1; // more need headers that plain servers do not send
  ort.env.wasm.wasmBinary = binary;
  const session = await ort.InferenceSession.create(base, {
    executionProviders: ["wasm"],
    externalData: [{ path: weights, data: new Uint8Array(data) }],
  });
  const words = new Words(new Tokenizer(tokens, settings), page.vocabulary, page.rules);
  return { page, session, texts, words };
}

// Refuse to go on where this tokenizer splits text in another way than the base's own.
function checkTokens(texts, { chat, samples }) {
  for (const [sample, ids, message] of samples) {
    if (texts.prompt(chat, sample, message).join() !== ids.join()) {
      const text = opening(chat, sample, message);
      throw new Error(`the tokenizer of this page splits "${text}" in another way than the base's`);
    }
  }
}

// A client's tensors, read once; after a failure they are asked for again.
function tensorsOf(file) {
  if (!tensors.has(file)) {
    const found = folder.tensors(file);
    tensors.set(file, found);
    found.catch(() => tensors.delete(file));
  }
  return tensors.get(file);
}

async function modelOf({ page, session }, client) {
  if (!models.has(client)) {
    const { file, zero, experts } = page.clients[client];
    const own = Object.entries(await tensorsOf(file)).map(([name, { dtype, data, shape }]) => {
      const values = zero && dtype === "float32" ? new Float32Array(data.length) : data;
      return [name, new ort.Tensor(dtype, values, shape)];
    });
    const routed = experts.length > 0;
    models.set(client, new Model(ort, session, Object.fromEntries(own), page.caches, routed));
  }
  return models.get(client);
}

async function work() {
  working = true;
  try {
    const loaded = await ready;
    let done = null;
    while (done !== wanted) {
      done = wanted;
      await answer(loaded, done);
    }
  } finally {
    working = false;
  }
}

async function answer(loaded, { id, text, message, clients }) {
  const { page, texts, words } = loaded;
  const blank = message === undefined && !strip(text);
  const ids = texts.prompt(page.chat, blank ? "" : text, message);
  const whole = opening(page.chat, text, message);
  const stale = async () => (await heard(), wanted.id !== id);
  for (const client of clients) {
    const model = await modelOf(loaded, client);
    const best = await words.of(model, ids, whole, page.shown, stale);
    if (best === null || (await stale())) return;
    self.postMessage({ kind: "words", id, client, words: best });
  }
  self.postMessage({ kind: "done", id });
}

// Let messages that have come in the meantime be heard.
function heard() {
  return new Promise((go) => {
    pause.port2.onmessage = go;
    pause.port1.postMessage(null);
  });
}

function failed(error) {
  self.postMessage({ kind: "failed", problem: error.message ?? String(error) });
}
