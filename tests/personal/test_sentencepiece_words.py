"""Next words where a tokenizer's names of tokens are its letters, not bytes: Czech and Polish
letters, and line ends, that byte-level vocabularies give another meaning.
"""

from pathlib import Path

import pytest
from random_models import write_base, write_models
from tiny_bases import GPT, SHAPE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

import coterie
from coterie.models.layout import Layout
from coterie.personal import PersonalModel

ONE = Layout(specialists=0, rank=1)


def tokenizer(pieces: list[str]) -> PreTrainedTokenizerFast:
    scores = [(piece, 0.1 * i - 2 - len(piece)) for i, piece in enumerate(pieces)]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def model_of(folder: Path, letter: str) -> PersonalModel:
    pieces = ["<unk>", "</s>", "▁", "▁a", "▁to", "▁je", "▁ře", letter, "b", ".", "▁si"]
    pieces += ["▁si" + letter] if letter.isalpha() else []
    config = LlamaConfig(**SHAPE, vocab_size=len(pieces), eos_token_id=1)
    write_models(folder / "run", write_base(folder / "base", config, tokenizer(pieces)), {"x": ONE})
    return coterie.load(folder / "run", "x")


@pytest.mark.parametrize(("odd", "plain"), [("č", "š"), ("ę", "ň"), ("\n", ";"), ("\t", ";")])
def test_a_letter_is_what_the_vocabulary_says(odd: str, plain: str, tmp_path: Path) -> None:
    """The same model, whose vocabulary has another name for one token, suggests the same."""
    suggested = []
    for name in (odd, plain):
        model = model_of(tmp_path / str(ord(name[0])), name)
        of = [model.next_words(text + name, 4) for text in ("to", "to ře")]
        of += [model.next_words("to", 4)]
        suggested.append(
            [[(w.word.replace(name, "*"), round(w.probability, 6)) for w in ws] for ws in of]
        )
    assert suggested[0] == suggested[1]


def test_texts_of_unlike_length_reach_the_end_of_the_context_together(tmp_path: Path) -> None:
    letters = [chr(97 + i) for i in range(8)]
    pieces = ["<unk>", "</s>", "▁", ".", *letters, *("▁" + letter for letter in letters)]
    config = GPT2Config(**GPT, vocab_size=len(pieces), eos_token_id=1, bos_token_id=1)
    base = write_base(tmp_path / "base", config, tokenizer(pieces))
    write_models(tmp_path / "run", base, {"ann": ONE, "ben": ONE})
    many = coterie.load_many(tmp_path / "run")
    texts = {"ann": ("a. " * 40).strip(), "ben": "abcdabcd"}
    together = many.next_words(texts, 40)
    for client, text in texts.items():
        alone = many.models[client].next_words(text, 40)
        assert [word.word for word in together[client]] == [word.word for word in alone]
