"""A model's settings beside its tensors: how texts and chats begin, and how answers end."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.data.text_encoding import TextEncoder
from coterie.personal import PersonalModel

GENERATION = "generation_config.json"
# the example programs continue this text, or answer this question
TEXT = "In my free time, I like to"
QUESTION = ({"role": "user", "content": "What is two and two?"},)


@dataclass(frozen=True)
class Serving:
    """The tokenizer and the settings of generation of a model."""

    tokenizer: Any  # a copy of the base's, with the chat template of the training
    generation: Any  # settings of transformers' `generate`, with the tokens that end an answer
    chats: bool  # whether the model was trained on conversations
    begin: tuple[int, ...]  # the ids at the beginning of a text that is not a chat
    stops: tuple[int, ...]  # the ids that end a text or an answer
    # the ids of `QUESTION` by the chat template; empty without a template
    prompt: tuple[int, ...] = ()
    prompt_text: str = ""  # their text

    @classmethod
    def of(cls, model: PersonalModel, chats: bool) -> "Serving":
        """Return the settings of a model that was trained on conversations, or on texts. Raises
        DataError if the tokenizer is not a fast one, or the chat template refuses a question.
        """
        tokenizer, generation = copy.copy(model.tokenizer), copy.deepcopy(model.generation_config)
        begin = tuple(TextEncoder(tokenizer).begin)
        if not chats:
            return cls(tokenizer, generation, False, begin, ids_of(generation.eos_token_id))
        chat = model.chats
        generation.eos_token_id = [*chat.stops] or None
        if chat.template is None:
            return cls(tokenizer, generation, True, begin, chat.stops)
        tokenizer.chat_template = chat.template
        prompt = tuple(chat.prompt(QUESTION)), chat.render(QUESTION, prompt=True)
        return cls(tokenizer, generation, True, begin, chat.stops, *prompt)

    @property
    def described(self) -> dict[str, Any]:
        """The entries for export.json."""
        return {
            "content": "chats" if self.chats else "text",
            "begin": self.begin,
            "stops": self.stops,
            "chat_template": bool(self.tokenizer.chat_template),
        }

    @property
    def usage(self) -> str:
        """Sentences on how to prompt the model."""
        begin = self.tokenizer.decode(list(self.begin))
        starts = f" Texts begin with `{begin}`, which the tokenizer writes." if begin else ""
        ends = ", ".join(f"`{token}`" for token in self.tokenizer.convert_ids_to_tokens(self.stops))
        if not self.chats:
            return f"It goes on with texts, up to {ends or 'any length'}.{starts}"
        written = (
            "a chat as `chat_template.jinja` writes it, which is whole: nothing is put before it"
            if self.prompt
            else f"prompts as they are.{starts}"
        )
        return f"It was trained on conversations: ask it {written}. An answer ends with {ends}."

    def in_program(self, program: str) -> str:
        """Replace PROMPT in a program by Python code for a prompt's ids, with a `tokenizer` of the
        package tokenizers, and STOPS by the ids that end an answer.
        """
        text = json.dumps(self.prompt_text or TEXT)
        begin = "" if self.prompt or not self.begin else f"{[*self.begin]} + "
        ids = f"{begin}tokenizer.encode({text}, add_special_tokens=False).ids"
        return program.replace("PROMPT", ids).replace("STOPS", str([*self.stops]))

    @property
    def transformers_program(self) -> str:
        """The end of a program that has a `model` and a `tokenizer` of transformers."""
        if self.prompt:
            prompt = f"""tokenizer.apply_chat_template(
    [{json.dumps(QUESTION[0])}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
        else:
            prompt = f'tokenizer({json.dumps(TEXT)}, return_tensors="pt")'
        return f"""prompt = {prompt}
answer = model.generate(**prompt, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the settings of `generate`. Raises SaveError."""
        self.tokenizer.save_pretrained(folder)
        text = self.generation.to_json_string(use_diff=True)
        write_atomically(folder / GENERATION, text.encode())


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids of a setting that is one id, several or None."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
