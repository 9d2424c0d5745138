// The text that a model goes on with, as export/chat_text.py has it from the base's chat template.

import { strip } from "./search.js";

// What was written so far as one text. chat: of page.json; text: of a chat the answer to a message.
export function opening(chat, text, message) {
  if (message === undefined) return text;
  return chat.before + said(chat, message) + chat.between + text;
}

// A message as the template writes it.
export const said = (chat, message) => (chat.strips ? strip(message) : message);
