"""A tiny tokenizer that counts, and a cache of each test's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


class Counting(PreTrainedTokenizerFast):
    """Remembers the lists of texts that it was asked to encode."""

    def __call__(self, text, **options):
        if isinstance(text, list):
            self.__dict__.setdefault("texts", []).extend(text)
        return super().__call__(text, **options)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Counting]:
    def make(vocabulary: int = 300, end: str | None = "<end>") -> Counting:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the cat and the dog and the bird"] * 10, trainer)
        return Counting(tokenizer_object=tokenizer, eos_token=end)

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Counting]) -> Counting:
    made = make_tokenizer()
    made.texts = []
    return made
