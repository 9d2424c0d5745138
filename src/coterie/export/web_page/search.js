// What the search for next words has found of one text: beginnings, and complete words. The same
// as coterie/personal/word_search.py, name by name; the numbers come from there by page.json.

// str.isspace() of Python, which differs from \s
const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const ONE_SPACE = new RegExp(`^${SPACE}$`, "u");
const EDGES = new RegExp(`^${SPACE}+|${SPACE}+$`, "gu");
const LETTER_OR_NUMBER = /[\p{L}\p{N}]/u; // str.isalnum() of a character

export const isSpace = (character) => ONE_SPACE.test(character);
export const strip = (text) => text.replace(EDGES, "");

const leastFirst = (a, b) => b.p - a.p; // the order of Python's stable sort by -p
const firstOf = (text) => String.fromCodePoint(text.codePointAt(0));

export class Search {
  // text: what was written so far; end: its tokens that are taken back, as the vocabulary writes
  // them; written: the same, decoded; depth: tokens that are looked at behind the prompt; k: words.
  constructor(text, end, written, depth, k, rules) {
    Object.assign(this, { text, end, written, depth, k, rules });
    this.beam = Math.max(rules.beam, 2 * k);
    this.level = [
      { ids: [], p: 1, left: end, letters: "", begun: false, tokens: 0, experts: null, row: 0 },
    ];
    this.mass = end ? 0 : 1; // of what begins with the end of the text
    this.found = new Map();
  }

  // Whether the text may end within a word.
  get within() {
    return this.end !== "" && !this.rules.spaces.includes(this.end.at(-1));
  }

  // Keep the beginnings that may still be among the best words, or say how likely the text's end
  // is. Returns how many.
  prune() {
    const best = [...this.found.values()].map((found) => found.p).sort((a, b) => b - a);
    const least = best.length >= this.k ? best[this.k - 1] : 0;
    const level = this.level.filter((b) => b.ids.length < this.depth).sort(leastFirst);
    const together = new Map(); // spellings of one word may be among the best by their sum
    for (const b of level) together.set(b.letters, (together.get(b.letters) ?? 0) + b.p);
    const words = level.filter((b) => !b.left && together.get(b.letters) > least);
    const spelling = level.filter((b) => b.left && b.p > this.rules.rare * this.mass);
    this.level = [...words.slice(0, this.beam), ...spelling.slice(0, this.beam)];
    return this.level.length;
  }

  // Add a complete word, or another spelling of one; `piece` is what its tokens say.
  note(piece, b, p) {
    const rest = piece.startsWith(this.written) ? piece.slice(this.written.length) : piece;
    if (!LETTER_OR_NUMBER.test(rest) || piece.includes("\ufffd")) return;
    const spaced = isSpace(firstOf(rest));
    const anew = !this.within || spaced;
    const blank = !strip(this.text) || isSpace(this.text.at(-1));
    const word = strip(rest);
    const insert = spaced && !blank ? ` ${word}` : word;
    const shown = anew ? word : this.lastWord() + word;
    const key = `${anew ? 1 : 0}${shown}`;
    if (!this.found.has(key)) {
      const experts = b.experts === null ? [] : b.experts.map((weight) => weight / b.tokens);
      this.found.set(key, { shown, experts, inserts: new Map(), p: 0 });
    }
    const found = this.found.get(key);
    found.inserts.set(insert, (found.inserts.get(insert) ?? 0) + p);
    found.p += p;
  }

  // The best words, none of which reads as another one.
  best() {
    const words = new Map();
    for (const { shown, experts, inserts, p } of [...this.found.values()].sort(leastFirst)) {
      const [insert] = [...inserts].reduce((a, b) => (b[1] > a[1] ? b : a));
      if (!words.has(shown)) {
        words.set(shown, { word: shown, insert, probability: p / this.mass, experts });
      }
    }
    return [...words.values()].slice(0, this.k);
  }

  // The letters that the text ends with: "(some sock" -> "sock".
  lastWord() {
    const letters = [...this.text];
    const ends = (c) => isSpace(c) || this.rules.punctuation.includes(c);
    return letters.slice(letters.findLastIndex(ends) + 1).join("");
  }
}
