// The text that a model goes on with, as export/chat_text.py has it from the base's chat template.

import { strip } from "./search.js";

// chat: of page.json; text: what was written so far, of a chat the answer to a message.
export function opening(chat, text, message) {
  if (message === undefined) return text;
  return chat.before + (chat.strips ? strip(message) : message) + chat.between + text;
}
