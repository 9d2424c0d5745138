// Text as token ids, as coterie/data/text_encoding.py has it: control tokens that people type stay
// text, since texts are encoded by a tokenizer that knows control tokens by other names, which
// nobody can type: they are random.

import { strip } from "./search.js";

const PRIVATE = 0xf0000; // the first of 65,534 characters for private use

export class Texts {
  // Tokenizer: of @huggingface/tokenizers; tokens, settings: the base's files; begin, empty: the ids
  // before a text, and those of none; controls: the control tokens; typed: what they are where
  // people type them.
  constructor(Tokenizer, tokens, settings, { begin, empty, controls, typed }) {
    const nonce = String.fromCodePoint(...Array.from(crypto.getRandomValues(new Uint16Array(6)), secret));
    const named = (token, i) => [token, nonce + String.fromCodePoint(PRIVATE + i)];
    Object.assign(this, { begin, empty, typed, names: new Map(controls.map(named)) });
    const longestFirst = [...controls].sort((a, b) => b.length - a.length).map(escaped);
    this.controls = new RegExp(longestFirst.join("|") || "(?!)", "g");
    this.tokenizer = new Tokenizer(renamed(tokens, this.names), settings);
  }

  // The ids of a text that goes on, or of the answer to a message, by what the chat template writes.
  prompt(chat, text, message) {
    if (message === undefined) {
      const ids = [...this.begin, ...this.encode(this.people(text))];
      return ids.length ? ids : this.empty;
    }
    const [before, between] = [chat.before, chat.between].map((part) => this.marked(part));
    return this.encode(before + this.people(said(chat, message)) + between + text);
  }

  people(text) {
    return this.typed === "tokens" ? this.marked(text) : text;
  }

  // Text whose control tokens are tokens.
  marked(text) {
    return text.replace(this.controls, (token) => this.names.get(token));
  }

  encode(text) {
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }
}

const secret = (number) => PRIVATE + (number % 0xfffe);
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

// A tokenizer.json with other names for some tokens.
function renamed(tokens, names) {
  const other = (token) => names.get(token) ?? token;
  const { vocab, unk_token: unknown } = tokens.model;
  const pairs = Array.isArray(vocab)
    ? vocab.map(([token, score]) => [other(token), score])
    : Object.fromEntries(Object.entries(vocab).map(([token, id]) => [other(token), id]));
  return {
    ...tokens,
    added_tokens: tokens.added_tokens.map((token) => ({ ...token, content: other(token.content) })),
    model: { ...tokens.model, vocab: pairs, unk_token: unknown && other(unknown) },
  };
}

// The text that a model goes on with, as export/web.py has it from the base's chat template. chat: of
// page.json; text: what was written so far, in a chat the answer to a message.
export function opening(chat, text, message) {
  if (message === undefined) return text;
  return chat.before + said(chat, message) + chat.between + text;
}

// A message as the template writes it.
const said = (chat, message) => (chat.strips ? strip(message) : message);
