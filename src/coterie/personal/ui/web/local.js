// The page of `coterie serve`: what is written goes to the server on this machine, and to no other.

import { Keyboard, element, made, percent, printable } from "./keyboard.js";

const [text, message] = [element("text"), element("message")];
let page; // of page.json

// The answer to a request. What went wrong is shown by `complain`, and the answer is then undefined.
async function asked(path, body, complain = notice, signal = undefined) {
  const json = body !== undefined && typeof body !== "string" && !(body instanceof Blob);
  const headers = json ? { "Content-Type": "application/json" } : {};
  const sent = body === undefined ? {} : { method: "POST", body: json ? JSON.stringify(body) : body };
  try {
    const answer = await fetch(path, { ...sent, headers, signal });
    if (answer.ok) {
      complain("");
      return answer;
    }
    const problem = await answer.text();
    complain(problem.startsWith("{") ? JSON.parse(problem).error.message : problem);
  } catch (error) {
    if (error.name !== "AbortError") complain("The server does not answer. Was it stopped?");
  }
}

function notice(problem) {
  element("notice").textContent = printable(problem, true);
  element("notice").hidden = !problem;
}

// Calls `work`, one call after another, until it has been called after the last change.
function latest(work) {
  let [working, again] = [false, false];
  return async () => {
    again = true;
    if (working) return;
    working = true;
    while (again) {
      again = false;
      await work();
    }
    working = false;
  };
}

function startWriting() {
  const chatting = page.kind === "chat";
  const written = () => ({ text: text.value, message: chatting ? message.value : undefined });
  const chat = chatting ? new Chat() : null;
  let reset = false;
  const ask = latest(async () => {
    const blank = chatting && !message.value.trim(); // there is nothing to answer yet
    for (const part of ["text-part", "words-part"]) element(part).hidden = blank;
    if (chat) chat.update();
    const clients = keyboard.chosen;
    if (blank || !clients.length) return;
    const now = JSON.stringify(written());
    const chats = clients.map((client) => chatOf(client, chat?.messagesTo(client, message.value)));
    const answer = await asked("words", { chats, text: text.value, reset });
    const words = await answer?.json();
    reset = false;
    if (words && now === JSON.stringify(written()))
      clients.forEach((client, i) => keyboard.show(client, words[i].words, words[i].shares));
  });
  const keyboard = new Keyboard(page, text, written, ask);
  keyboard.addExamples(chatting ? message : text);
  for (const box of [text, message]) box.addEventListener("input", ask);
  element("writing").hidden = false;
  element("restart").hidden = !page.follows;
  element("restart").addEventListener("click", () => {
    reset = true;
    ask();
  });
  chat?.start(keyboard);
  (chatting ? message : text).focus();
  ask();
}

const chatOf = (client, messages) => ({ client: page.clients[client].name, messages: messages ?? [] });

class Chat {
  histories = page.clients.map(() => []); // messages by client
  stopper = null; // of the answers that are being written

  start(keyboard) {
    this.keyboard = keyboard;
    element("message-part").hidden = false;
    element("text-label").textContent = "Answer, word by word";
    text.rows = 1;
    element("who").textContent = "Who answers";
    element("people").open = page.clients.length > 2;
    element("writing").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    element("stop").addEventListener("click", () => this.stopper?.abort());
    element("new").addEventListener("click", () => {
      this.stopper?.abort();
      this.histories = page.clients.map(() => []);
      element("log").replaceChildren();
      keyboard.write(text, "");
      keyboard.write(message, "");
      this.update();
    });
  }

  messagesTo(client, content) {
    return [...this.histories[client], { role: "user", content }];
  }

  update() {
    element("send").disabled = this.stopper || !message.value.trim() || !this.keyboard.chosen.length;
    element("stop").hidden = !this.stopper;
    const begun = element("log").childElementCount > 0;
    for (const id of ["log", "new"]) element(id).hidden = !begun;
    element("examples").hidden = begun;
  }

  async send() {
    this.update();
    if (element("send").disabled) return;
    const clients = this.keyboard.chosen;
    const chats = clients.map((client) => chatOf(client, this.messagesTo(client, message.value)));
    const bubbles = this.addTurn(message.value, clients);
    const [histories, stopper] = [this.histories, new AbortController()];
    this.stopper = stopper;
    text.value = "";
    this.keyboard.write(message, "");
    const texts = await answered(chats, bubbles, stopper.signal);
    clients.forEach((client, i) => {
      bubbles[i].setAttribute("aria-busy", false);
      // a message without an answer is asked anew, as if it had not been sent
      const content = texts[i].trim();
      if (content) histories[client] = [...chats[i].messages, { role: "assistant", content }];
    });
    if (this.stopper === stopper) this.stopper = null;
    this.update();
  }

  addTurn(content, clients) {
    const [turn, answers] = [made("div", "turn"), made("div", "answers")];
    const bubbles = clients.map((client) => {
      const bubble = made("article", "bubble answer");
      const { name, shares } = page.clients[client];
      bubble.setAttribute("aria-busy", true);
      bubble.append(made("h2", "", printable(name)), made("p"));
      bubble.title = shares;
      return bubble;
    });
    answers.append(...bubbles);
    turn.append(made("p", "bubble sent", printable(content, true)), answers);
    element("log").append(turn);
    return bubbles;
  }
}

// Shows the clients' answers as they come, and returns them when they have ended or were stopped.
async function answered(chats, bubbles, signal) {
  const texts = chats.map(() => "");
  const end = (i, words) => bubbles[i].append(made("p", "shares", words));
  const fail = (problem) => problem && bubbles.forEach((_, i) => end(i, printable(problem, true)));
  const answer = await asked("chat", { chats }, fail, signal);
  try {
    for await (const { choices, error } of answer ? events(answer.body) : []) {
      if (error) fail(error.message);
      for (const { index, delta, finish_reason: reason } of choices ?? []) {
        texts[index] += delta.content ?? "";
        const writing = element("message-part");
        const seen = writing.getBoundingClientRect().top < innerHeight;
        bubbles[index].querySelector("p").textContent = printable(texts[index].trim(), true);
        if (reason) bubbles[index].setAttribute("aria-busy", false);
        if (reason === "length") end(index, "cut off here");
        else if (reason && !texts[index].trim()) end(index, "no answer");
        if (seen) writing.scrollIntoView({ block: "nearest" });
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") fail("The server does not answer. Was it stopped?");
  }
  if (signal.aborted)
    bubbles.forEach((bubble, i) => bubble.getAttribute("aria-busy") === "true" && end(i, "stopped"));
  return texts;
}

// The events of a stream, up to "[DONE]".
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) if (event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}

function startTexts() {
  element("title").textContent = page.title;
  for (const id of ["words-part", "message-part"]) element(id).remove();
  element("writing").hidden = false;
  const ask = latest(() => classify(text.value.trim() ? text.value : null));
  text.addEventListener("input", ask);
  text.focus();
}

function startImages() {
  const [input, drop, preview] = ["image", "drop", "preview"].map(element);
  const [height, width] = page.inputs.slice(1);
  element("title").textContent = page.title;
  element("size").textContent =
    `Choose an image of height ${height} and width ${width} pixels, or drop it here.`;
  element("image-part").hidden = false;
  let file = null;
  const ask = latest(() => classify(file));
  const choose = (chosen) => {
    file = chosen ?? null;
    URL.revokeObjectURL(preview.src);
    if (file) preview.src = URL.createObjectURL(file);
    else input.value = "";
    for (const part of [preview, element("remove")]) part.hidden = !file;
    ask();
  };
  input.addEventListener("change", () => input.files.length && choose(input.files[0]));
  element("remove").addEventListener("click", () => choose(null));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"])
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
    });
}

// Shows what each client answers; of nothing, nothing.
async function classify(given) {
  const answer = given === null ? notice("") : await asked("classes", given);
  element("results").replaceChildren(...((await answer?.json()) ?? []).map(result));
}

function result({ clients, classes, expert }) {
  const [row, client, list] = [made("div", "result"), made("div", "client"), made("ul", "classes")];
  const names = made("p");
  for (const name of clients) names.append(names.firstChild ? ", " : "", made("span", "name", printable(name)));
  client.append(names, made("p", "expert", expert));
  for (const [name, share] of classes) {
    const [item, bar] = [made("li", "", printable(name)), made("div", "bar")];
    bar.style.setProperty("--share", percent(share, 1));
    item.append(made("span", "", percent(share, 0)), bar);
    list.append(item);
  }
  row.append(client, list);
  return row;
}

page = await (await asked("page.json"))?.json();
const start = { words: startWriting, chat: startWriting, text: startTexts, image: startImages };
start[page?.kind]?.();
