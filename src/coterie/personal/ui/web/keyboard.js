// The keyboard: rows of the clients' next words. Where the words come from is the page's affair.

export const element = (id) => document.getElementById(id);

export function made(tag, classes = "", text = "") {
  const node = document.createElement(tag);
  node.className = classes;
  node.textContent = text;
  return node;
}

export function madeButton(classes, text, clicked) {
  const node = made("button", classes, text);
  node.type = "button";
  node.addEventListener("click", () => clicked(node));
  return node;
}

// Control and invisible characters are shown by their numbers, as coterie.core.printing does; of
// several lines, their ends and tabs are kept.
export function printable(text, lines = false) {
  const kept = lines ? "\u200c\u200d\n\t" : "\u200c\u200d";
  const one = lines ? text : text.replace(/(?<![ \t])[ \t]*(?:\r?\n[ \t]*)+/g, " ↵ ");
  return one.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) =>
    kept.includes(c) ? c : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`,
  );
}

export class Keyboard {
  // page: of page.json; text: the box that words are added to; written: all that was written;
  // changed: is called when other words, or those of others, are to be shown.
  constructor(page, text, written, changed) {
    Object.assign(this, { page, text, written, changed, rows: [] });
    element("title").textContent = page.title;
    page.clients.forEach((client) => this.addClient(client));
    element("people").hidden = page.clients.length < 3;
    element("legend").append(...legend(page));
  }

  // Examples are put into one box, and the next key goes to another.
  addExamples(box, next = box) {
    const put = ({ textContent }) => {
      box.value = textContent;
      this.write(next, next.value);
    };
    const buttons = this.page.examples.map((example) => madeButton("example", example, put));
    element("examples").append(...buttons);
  }

  addClient({ name, shares, chosen }) {
    const row = made("div", "row");
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", printable(name));
    row.hidden = !chosen;
    const client = made("div", "client");
    client.append(made("p", "", printable(name)), made("p", "shares", shares));
    const words = Array.from({ length: this.page.shown }, () =>
      madeButton("word", "…\n\u00a0", (button) => this.append(button)),
    );
    for (const button of words) button.disabled = true;
    row.append(client, ...words);
    element("rows").append(row);
    this.rows.push(row);
    const box = made("input");
    Object.assign(box, { type: "checkbox", checked: chosen });
    box.addEventListener("change", () => {
      row.hidden = !box.checked;
      this.changed();
    });
    const choice = made("label");
    choice.append(box, " ", made("span", "", printable(name)));
    element("choices").append(choice);
  }

  // The numbers of the clients that are shown.
  get chosen() {
    return [...this.rows.keys()].filter((client) => !this.rows[client].hidden);
  }

  write(box, words) {
    box.value = words;
    box.focus();
    box.setSelectionRange(words.length, words.length);
    this.changed();
  }

  // A word is added to the text that it was found for; for another, words are on their way.
  append(button) {
    const { written, insert } = button.dataset;
    if (written === JSON.stringify(this.written())) this.write(this.text, this.text.value + insert);
  }

  show(client, words, shares) {
    const { experts } = this.page.clients[client];
    const row = this.rows[client];
    if (shares !== undefined) row.querySelector(".shares").textContent = shares;
    row.querySelectorAll("button").forEach((button, place) => {
      button.hidden = place >= words.length;
      if (!button.hidden) this.showWord(button, words[place], experts);
    });
  }

  showWord(button, { word, insert, probability, experts }, names) {
    const most = experts.reduce((best, weight, i) => (weight > experts[best] ? i : best), 0);
    const by = experts.length ? ` · ${names[most]} ${percent(experts[most], 0)}` : "";
    const style = experts.length ? `expert${most % this.page.colours}` : "unrouted";
    button.className = `word ${style}`;
    button.textContent = `${printable(word)}\n${percent(probability, 1)}${by}`;
    button.dataset.written = JSON.stringify(this.written());
    button.dataset.insert = insert;
    button.disabled = false;
  }
}

export const percent = (share, digits) => `${(100 * share).toFixed(digits)}%`;

// Letters and colours of the experts, of the client with the most.
function legend({ clients, colours }) {
  const most = clients.reduce((a, b) => (b.experts.length > a.experts.length ? b : a)).experts;
  if (!most.length) return [made("p", "", "Below each word: its probability.")];
  const kinds = { G: "generalist, shared with the others", S: "specialist, the client's own" };
  const keys = made("p");
  most.forEach((name, place) => {
    const key = made("span");
    key.append(made("i", `expert${place % colours}`), made("b", "", name), ` ${kinds[name[0]]}`);
    keys.append(key);
  });
  const rest =
    "Below each word: its probability, and the expert with the largest routing weight where the " +
    "word was chosen, with that weight (mean over all blocks).";
  return [keys, made("p", "", rest)];
}
