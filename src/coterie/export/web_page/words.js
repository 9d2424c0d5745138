// The next words of a text with their probabilities, though the model only knows tokens: the same
// search as coterie/personal/words.py, name by name, for one text and one model at a time.

import { Search } from "./search.js";

export class Words {
  // tokenizer: of @huggingface/tokenizers; vocabulary, rules: those of page.json.
  constructor(tokenizer, vocabulary, rules) {
    Object.assign(this, { tokenizer, rules, names: vocabulary.names, first: vocabulary.first });
    this.context = vocabulary.context;
    this.tidy = { clean_up_tokenization_spaces: vocabulary.tidy };
    this.silent = new Set(rules.noLetters);
    this.spaces = new Set(rules.spaces);
    this.starts = Uint8Array.from(this.names, (name) => this.startsWord(name));
    this.inside = Uint8Array.from(this.names, (name) => this.continuesWord(name));
    this.anywhere = this.starts.map((starts, i) => starts | this.inside[i]);
    this.byName = new Map();
    this.names.forEach((name, i) => name && this.byName.set(name, [...this.named(name), i]));
    this.completing = new Map(); // by beginning: kept, for few are asked for
    // put before what is decoded, since tokenizers may swallow its first space
    this.anchor = vocabulary.anchor;
    this.anchorText = tokenizer.decode([this.anchor], this.tidy);
  }

  // The k most likely next words of a text, given with its ids, best first; null as soon as `stale()` says that nobody
  // waits for them any more.
  async of(model, ids, text, k, stale = () => false) {
    const [prompt, search] = this.begin(ids, text, k);
    let { cache, p, experts } = await model.prompt(prompt);
    this.goOn(search, p, experts);
    for (let step = 0; step < this.rules.unfinished + this.rules.longest; step++) {
      if (!search.prune()) break;
      if (await stale()) return null;
      const last = search.level.map((b) => b.ids.at(-1));
      const rows = search.level.map((b) => b.row);
      ({ cache, p, experts } = await model.next(cache, rows, last));
      this.goOn(search, p, experts);
    }
    return search.best();
  }

  // The prompt, and the search that begins behind it.
  begin(ids, text, k) {
    const cut = ids.length - this.unfinished(ids);
    const back = ids.slice(cut);
    const end = back.map((i) => this.names[i]).join("");
    // a word's end is seen one token later, hence one more
    const depth = back.length + this.rules.longest + 1;
    const search = new Search(text, end, this.decode(back), depth, k, this.rules);
    const prompt = ids.slice(0, cut).slice(-Math.max(this.context - depth, 1));
    return [prompt.length ? prompt : [this.first], search];
  }

  // How many tokens at the end of a text are its last word, or a space in which a word may have
  // begun.
  unfinished(ids) {
    for (let count = 0; count < ids.length; count++) {
      const name = this.names[ids[ids.length - 1 - count]];
      if (count === this.rules.unfinished || !name || this.silent.has(name.at(-1))) return count;
      if (this.spaces.has(name[0]) || [...name].some((c) => this.silent.has(c))) {
        const lineBreak = !this.bare(name) && !"Ġ▁".includes(name.at(-1));
        return count && lineBreak ? count : count + 1;
      }
    }
    return ids.length;
  }

  // Record the complete words, and extend the other beginnings: p[row] (V,) of the next token of
  // each.
  goOn(search, p, experts) {
    const level = [];
    search.level.forEach((b, row) => {
      const longer = this.extensions(search, b, p[row]);
      for (const [token, value] of longer) {
        if (value > 0) level.push(this.child(search, b, row, token, b.p * value, experts[row]));
      }
    });
    search.level = level;
  }

  // The tokens that extend a beginning, with their probabilities; what it says is recorded where a
  // word may end there.
  extensions(search, b, p) {
    const allowed = this.allowed(b);
    const { total, best } = largest(p, allowed, search.beam);
    if (b.begun) search.note(this.decode(b.ids), b, b.p * Math.max(1 - total, 0));
    const longer = new Map(best);
    if (b.left) {
      search.mass += b.p * this.longer(b.left).reduce((sum, i) => sum + p[i], 0);
      for (const i of this.shorter(b.left)) longer.set(i, p[i]);
    }
    return longer;
  }

  // (V,) which tokens may extend a beginning as the same word.
  allowed(b) {
    if (b.begun) return this.inside;
    if (!b.left) return this.anywhere;
    const found = new Uint8Array(this.names.length);
    for (const i of this.longer(b.left)) {
      const rest = this.names[i].slice(b.left.length);
      found[i] = !rest || !this.silent.has(rest[0]);
    }
    return found;
  }

  // The tokens that begin with `left`.
  longer(left) {
    if (!this.completing.has(left)) {
      const found = [];
      this.names.forEach((name, i) => name.startsWith(left) && found.push(i));
      this.completing.set(left, found);
    }
    return this.completing.get(left);
  }

  // The tokens that `left` begins with.
  shorter(left) {
    const sizes = Array.from({ length: left.length - 1 }, (_, i) => i + 1);
    return sizes.flatMap((size) => this.named(left.slice(0, size)));
  }

  // The tokens of a name: one, or none.
  named(name) {
    return this.byName.get(name) ?? [];
  }

  // A beginning with one token more than that in a row; `experts` are the weights at the position
  // that chose it.
  child(search, b, row, token, p, experts) {
    const name = this.names[token];
    const left = b.left.slice(name.length);
    const begun = b.begun || (!left && name !== b.left);
    const spaced = this.spaces.has(name[0]);
    // the tokens of a finished word are none of the next one's
    const anew = begun && !b.begun && !b.left && search.within && spaced;
    const [tokens, before] = anew ? [0, null] : [b.tokens, b.experts];
    const own =
      before === null || experts === null ? experts : before.map((weight, i) => weight + experts[i]);
    const letters = b.letters + (spaced ? ` ${this.bareLeft(name)}` : name);
    return { ids: [...b.ids, token], p, left, letters, begun, tokens: tokens + 1, experts: own, row };
  }

  decode(ids) {
    return this.tokenizer.decode([this.anchor, ...ids], this.tidy).slice(this.anchorText.length);
  }

  // Whether a token begins a new word, with the space before it.
  startsWord(name) {
    const bare = this.bareLeft(name);
    return bare !== name && !this.silent.has(bare[0]);
  }

  // Whether a token continues a word.
  continuesWord(name) {
    return name !== "" && !this.spaces.has(name[0]) && !this.silent.has(name[0]);
  }

  bareLeft(name) {
    let from = 0;
    while (this.spaces.has(name[from])) from++;
    return name.slice(from);
  }

  bare(name) {
    return [...name].filter((c) => !this.spaces.has(c)).length > 0;
  }
}

// The sum of the allowed probabilities, and the largest of them: [token, probability], best first.
function largest(p, allowed, count) {
  let total = 0;
  const best = [];
  for (let i = 0; i < p.length; i++) {
    if (!allowed[i]) continue;
    total += p[i];
    if (best.length === count && p[i] <= best[count - 1][1]) continue;
    let place = best.length;
    while (place > 0 && best[place - 1][1] < p[i]) place--;
    best.splice(place, 0, [i, p[i]]);
    if (best.length > count) best.pop();
  }
  return { total, best };
}
