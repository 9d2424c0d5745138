"""A tokenizer for llama.cpp: the tokens and merges of a byte-level BPE, and the pattern that splits
text first, which llama.cpp knows only by name.
"""

import json
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import Refused
from coterie.export.serving import Serving

# the end of a text, a turn and a message: llama.cpp stops at each
ENDS = ("eos", "eot", "eom")
# llama.cpp's kinds of tokens
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names by the steps in tokenizer.json: whether digits are split, and the pattern
SPLITS = {
    (False, _GPT2): "gpt-2",
    (True, _GPT2): "smollm",
    (False, _WORDS % "{1,3}"): "llama-bpe",
    (False, _WORDS % ""): "qwen2",
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a byte-level BPE."""

    texts: list[str]  # by id; ids beyond the tokenizer's are unused
    kinds: list[int]  # llama.cpp's, by id
    merges: list[str]  # in order
    split: str  # llama.cpp's name of the pattern that splits text first

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> "Tokens":
        """Return the tokens of a tokenizer, for a base with `size` tokens. Raises Refused if the
        tokenizer is of another kind, or splits text in a way that llama.cpp does not know.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        description = json.loads(backend.to_str()) if backend is not None else {}
        model = description.get("model", {})
        split = _split(description)
        merges = model.get("merges")
        if model.get("type") != "BPE" or model.get("byte_fallback") or not merges or not split:
            raise Refused(
                "the base's tokenizer is none that can be written for llama.cpp here: a byte-level "
                "BPE that splits text as GPT-2, SmolLM, Llama 3 or Qwen 2 does",
                "Use --format mixtral, whose checkpoint llama.cpp's own convert_hf_to_gguf.py "
                "reads, or --format peft.",
            )
        ids = [*model["vocab"].values(), *(token["id"] for token in description["added_tokens"])]
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < size:
            raise Refused(
                f"the base's tokenizer has tokens from {min(ids)} to {max(ids)}, and the base "
                f"{size}",
                "The tokenizer belongs to another base: get both again.",
            )
        texts = [f"[UNUSED{i}]" for i in range(size)]
        kinds = [UNUSED] * size
        for text, i in model["vocab"].items():
            texts[i], kinds[i] = text, NORMAL
        for token in description["added_tokens"]:
            texts[token["id"]] = token["content"]
            kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        return cls(texts, kinds, pairs, split)

    def write(self, writer: Any, serving: Serving) -> None:
        """Write the tokens, the special tokens and the chat template to a file of llama.cpp."""
        ends = end_tokens(serving)
        kinds = [CONTROL if i in ends.values() else kind for i, kind in enumerate(self.kinds)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.texts)
        writer.add_token_types(kinds)
        writer.add_token_merges(self.merges)
        tokenizer = serving.tokenizer
        others = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "unk")}
        for name, token in (others | ends).items():
            if token is not None:
                getattr(writer, f"add_{name}_token_id")(token)
        # llama.cpp strips this token from a template's text, and then puts it first
        first = (serving.prompt or serving.begin)[:1]
        writer.add_add_bos_token(first == (tokenizer.bos_token_id,))
        writer.add_add_eos_token(False)
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def end_tokens(serving: Serving) -> dict[str, int]:
    """Return the tokens that end a text by llama.cpp's names. Raises Refused for too many."""
    end = serving.tokenizer.eos_token_id
    # the end of a text first
    stops = sorted(serving.stops, key=lambda stop: stop != end)
    if len(stops) > len(ENDS):
        raise Refused(
            f"llama.cpp has names for {len(ENDS)} tokens that end an answer, and the base has "
            f"{len(stops)}",
            "Use --format mixtral or --format peft.",
        )
    return dict(zip(ENDS, stops, strict=False))


def check_serving(serving: Serving) -> None:
    """Check that llama.cpp knows how texts begin and end. Raises Refused."""
    end_tokens(serving)
    if not serving.prompt and serving.begin not in ((), (serving.tokenizer.bos_token_id,)):
        begin = serving.tokenizer.decode(list(serving.begin))
        raise Refused(
            f"the base's texts begin with {begin!r}, and llama.cpp puts its beginning token or "
            f"nothing before a text",
            "Use --format mixtral or --format peft.",
        )


def _split(description: dict[str, Any]) -> str:
    """Return llama.cpp's name of the way a tokenizer.json splits text; "" without a name."""
    # accepted, though llama.cpp leaves it out
    normalizer = (description.get("normalizer") or {}).get("type", "NFC")
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps = (
        pre_tokenizer["pretokenizers"]
        if pre_tokenizer.get("type") == "Sequence"
        else [pre_tokenizer]
    )
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if normalizer != "NFC" or kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    digits, pattern = False, _GPT2 if last.get("use_regex", True) else ""
    for step in steps[:-1]:
        if step["type"] == "Digits" and step.get("individual_digits"):
            digits = True
        elif step["type"] == "Split" and not pattern:
            pattern = step["pattern"].get("Regex", "")
        else:
            return ""
    return SPLITS.get((digits, pattern), "")
