"""The state of the search for a text's next words: beginnings, and complete words."""

import string
from dataclasses import dataclass, field

from torch import Tensor

BEAM = 16  # beginnings that are extended at once, at least
# spellings of an unfinished word with no more than this share of its probability are dropped
RARE = 1e-3
# the space of byte-level and of SentencePiece vocabularies, then newline, tab, carriage return
SPACES = "Ġ▁Ċĉč"
PUNCTUATION = frozenset(string.punctuation) - {"'"}  # "'" is part of words


@dataclass(frozen=True)
class Word:
    """A suggestion.

    Args:
        word: The whole word, also where its first letters are already in the text.
        insert: The text to append: the rest of the word, after a space if it needs one.
        probability: The probability, given the text, that this is the next word or completes the
            unfinished last word.
        experts: (n,) the weight of each expert in choosing the word's tokens, the mean over these
            tokens and over all blocks; they add up to 1. Empty without a router.
    """

    word: str
    insert: str
    probability: float
    experts: tuple[float, ...]


@dataclass(frozen=True)
class Beginning:
    """The first tokens after a prompt."""

    ids: tuple[int, ...] = ()
    p: float = 1.0  # the probability of the tokens
    # the part of the text's end that the tokens do not spell yet, in the vocabulary's characters
    left: str = ""
    letters: str = ""  # the text of the tokens, with any white space as one space
    begun: bool = False  # whether a word has begun or been continued after the text
    tokens: int = 0  # of that word
    # (n,) the experts' weights, summed over the tokens of that word; None without a router
    experts: Tensor | None = None
    row: int = 0  # of all but the last token, in the previous pass


@dataclass
class Match:
    """A complete word that the search has reached."""

    experts: tuple[float, ...]  # of its first spelling, see `Word`
    # the probability of each text to append
    inserts: dict[str, float] = field(default_factory=dict)

    @property
    def p(self) -> float:
        return sum(self.inserts.values())


class Search:
    """The search for the next words of one text: `end` are the tokens taken back from the end of
    the text, in the vocabulary's characters, `written` the same decoded, `depth` the most tokens
    after the prompt.
    """

    def __init__(self, text: str, end: str, written: str, depth: int, k: int) -> None:
        self.text, self.end, self.written, self.depth, self.k = text, end, written, depth, k
        self.beam = max(BEAM, 2 * k)
        self.level = [Beginning(left=end)]
        # the probability of all sequences that begin with the end of the text
        self.mass = 0.0 if end else 1.0
        self.matches: dict[tuple[str, bool], Match] = {}

    @property
    def within(self) -> bool:
        """Whether the text may end within a word."""
        return bool(self.end) and self.end[-1] not in SPACES

    def prune(self) -> int:
        """Keep the beginnings that may still be among the best words, or that contribute to the
        probability of the text's end. Return their number.
        """
        best = sorted((candidate.p for candidate in self.matches.values()), reverse=True)
        least = best[self.k - 1] if len(best) >= self.k else 0.0
        level = sorted((b for b in self.level if len(b.ids) < self.depth), key=lambda b: -b.p)
        # several spellings of one word may be among the best by their sum
        together: dict[str, float] = {}
        for b in level:
            together[b.letters] = together.get(b.letters, 0.0) + b.p
        words = [b for b in level if not b.left and together[b.letters] > least]
        spelling = [b for b in level if b.left and b.p > RARE * self.mass]
        self.level = words[: self.beam] + spelling[: self.beam]
        return len(self.level)

    def note(self, piece: str, b: Beginning, p: float) -> None:
        """Add a complete word, or another spelling of it; `piece` is the text of its tokens."""
        insert = piece.removeprefix(self.written)
        if not any(c.isalnum() for c in insert) or "\ufffd" in piece:
            return
        new = not self.within or insert[0].isspace()
        blank = not self.text.strip() or self.text[-1].isspace()
        word = insert.strip()
        insert = " " + word if insert[0].isspace() and not blank else word
        shown = word if new else last_word(self.text) + word
        experts = () if b.experts is None else tuple((b.experts / b.tokens).tolist())
        inserts = self.matches.setdefault((shown, new), Match(experts)).inserts
        inserts[insert] = inserts.get(insert, 0.0) + p

    def best(self) -> list[Word]:
        """Return the best words, each text only once."""
        words: dict[str, Word] = {}
        for (shown, _), candidate in sorted(self.matches.items(), key=lambda item: -item[1].p):
            insert = max(candidate.inserts, key=candidate.inserts.__getitem__)
            words.setdefault(shown, Word(shown, insert, candidate.p / self.mass, candidate.experts))
        return list(words.values())[: self.k]


def last_word(text: str) -> str:
    """Return the letters that a text ends with: "(some sock" -> "sock"."""
    size = next(
        (i for i, c in enumerate(reversed(text)) if c.isspace() or c in PUNCTUATION), len(text)
    )
    return text[len(text) - size :]
