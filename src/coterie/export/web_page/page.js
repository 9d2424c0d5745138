// The page: what is typed goes to the worker, and the worker's words to the buttons.

const element = (id) => document.getElementById(id);
const text = element("text");
const message = element("message"); // null where the text answers none
const rows = new Map(); // by the client's number
let page, worker;
let asked = 0; // the number of the last question
let broken = false;

start().catch((error) => failed(error.message));

async function start() {
  if (document.documentElement.classList.contains("stopped")) return;
  const answer = await fetch("page.json", { cache: "no-cache" });
  if (!answer.ok) throw new Error(`page.json cannot be read (${answer.status})`);
  page = await answer.json();
  page.clients.forEach(addClient);
  element("people").hidden = page.clients.length < 3;
  worker = new Worker(await workerAddress(), { type: "module" });
  worker.onmessage = ({ data }) => HEARD[data.kind](data);
  worker.onerror = () => failed("the page's worker does not start");
  for (const box of [message, text]) box?.addEventListener("input", ask);
  for (const button of document.querySelectorAll("button.example")) {
    button.addEventListener("click", () => write(message ?? text, button.textContent));
  }
  ask();
}

// A worker from a blob keeps to the page's Content-Security-Policy; one from a file would have none.
async function workerAddress() {
  const code = `import ${JSON.stringify(new URL("worker.js", location.href).href)};`;
  return URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
}

function addClient({ name, chosen }, client) {
  const row = element("row").content.firstElementChild.cloneNode(true);
  row.querySelector(".client p").textContent = name;
  row.setAttribute("aria-label", name);
  row.hidden = !chosen;
  row.querySelectorAll("button").forEach((button) => {
    button.addEventListener("click", () => append(button));
  });
  element("rows").append(row);
  rows.set(client, row);
  const choice = element("choice").content.firstElementChild.cloneNode(true);
  const box = choice.querySelector("input");
  choice.querySelector("span").textContent = name;
  box.checked = chosen;
  box.addEventListener("change", () => {
    row.hidden = !box.checked;
    ask();
  });
  element("choices").append(choice);
}

function ask() {
  const clients = [...rows.keys()].filter((client) => !rows.get(client).hidden);
  worker.postMessage({ id: ++asked, ...said(), clients });
}

// What was written.
function said() {
  return { text: text.value, message: message?.value };
}

function write(box, words) {
  box.value = words;
  text.focus();
  text.setSelectionRange(text.value.length, text.value.length);
  ask();
}

// A word is added to the text that it was found for: if that has moved on, others are on their way.
function append(button) {
  if (button.dataset.said === JSON.stringify(said())) write(text, text.value + button.dataset.insert);
}

function showWords({ id, client, words }) {
  if (id !== asked) return;
  const { experts } = page.clients[client];
  rows.get(client).querySelectorAll("button").forEach((button, place) => {
    button.hidden = place >= words.length;
    if (!button.hidden) show(button, words[place], experts);
  });
}

function show(button, { word, insert, probability, experts }, names) {
  const most = experts.reduce((best, weight, i) => (weight > experts[best] ? i : best), 0);
  const percent = (share, digits) => `${(100 * share).toFixed(digits)}%`;
  const by = experts.length ? ` · ${names[most]} ${percent(experts[most], 0)}` : "";
  const style = experts.length ? `expert${most % page.colours}` : "unrouted";
  button.className = `word ${style}`;
  button.textContent = `${printable(word)}\n${percent(probability, 1)}${by}`;
  button.dataset.said = JSON.stringify(said());
  button.dataset.insert = insert;
  button.disabled = false;
}

// Control and invisible characters are shown by their numbers, as coterie.core.printing does.
function printable(word) {
  return word.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) =>
    "\u200c\u200d".includes(c) ? c : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`,
  );
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
