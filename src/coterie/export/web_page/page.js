// The page: what is typed goes to the worker, and the worker's words to the keyboard.

import { Keyboard, element } from "./keyboard.js";

const text = element("text");
const message = element("message");
let page, worker, keyboard;
let asked = 0; // the number of the last question
let broken = false;

start().catch((error) => failed(error.message));

async function start() {
  if (document.documentElement.classList.contains("stopped")) return;
  const answer = await fetch("page.json", { cache: "no-cache" });
  if (!answer.ok) throw new Error(`page.json cannot be read (${answer.status})`);
  page = await answer.json();
  keyboard = new Keyboard(page, text, said, ask);
  if (page.chat) {
    element("message-part").hidden = false;
    element("text-label").textContent = "Answer";
  }
  keyboard.addExamples(page.chat ? message : text, text);
  worker = new Worker(await workerAddress(), { type: "module" });
  worker.onmessage = ({ data }) => HEARD[data.kind](data);
  worker.onerror = () => failed("the page's worker does not start");
  for (const box of [message, text]) box.addEventListener("input", ask);
  ask();
}

// A worker from a blob keeps to the page's Content-Security-Policy; one from a file would have none.
async function workerAddress() {
  const code = `import ${JSON.stringify(new URL("worker.js", location.href).href)};`;
  return URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
}

function ask() {
  worker.postMessage({ id: ++asked, ...said(), clients: keyboard.chosen });
}

// What was written.
function said() {
  return { text: text.value, message: page.chat ? message.value : undefined };
}

function showWords({ id, client, words }) {
  if (id === asked) keyboard.show(client, words);
}

function showLoading({ here, all }) {
  if (broken) return; // other files go on loading
  element("bar").max = all || 1;
  element("bar").value = Math.min(here, all);
  const [done, of] = [here, all].map((size) => (size / 1e6).toFixed(1));
  element("status").textContent = `Loading the models: ${done} of ${of} MB`;
}

function settled({ id }) {
  if (id !== asked) return;
  element("loading").hidden = true;
  broken = false;
  document.documentElement.dataset.settled = id;
}

function failed(problem) {
  broken = true;
  element("bar").hidden = true;
  element("loading").hidden = false;
  element("status").textContent =
    `This did not work: ${problem}. Is the whole folder there? Load the page to try again.`;
}

const HEARD = {
  loading: showLoading,
  words: showWords,
  done: settled,
  failed: ({ problem }) => failed(problem),
};
