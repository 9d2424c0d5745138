"""What the search for next words has found of one text: beginnings, and complete words."""

import string
from dataclasses import dataclass, field

from torch import Tensor

BEAM = 16  # beginnings that are looked into at once, at least
# of the probability of an unfinished word: what a spelling of it may have at most to be left out
RARE = 1e-3
# a space as byte-level and SentencePiece vocabularies write it, then newline, tab, carriage return
SPACES = "Ġ▁Ċĉč"
# "'" is part of words; the last are the control characters as byte-level vocabularies write them
PUNCTUATION = frozenset(string.punctuation) - {"'"}


@dataclass(frozen=True)
class Word:
    """A suggestion.

    Args:
        word: The whole word, also where its first letters are already in the text.
        insert: What is to be appended to the text: the rest of the word, with a space before it if
            it needs one.
        probability: That it is the next word, or the whole of the unfinished last word, given the
            text as it is.
        experts: (n,) the weight of each expert where the word's tokens were chosen, the mean over
            these tokens and over all blocks; they add up to 1. Empty without a router.
    """

    word: str
    insert: str
    probability: float
    experts: tuple[float, ...]


@dataclass(frozen=True)
class Beginning:
    """The first tokens behind a prompt.

    Args:
        ids: Of the tokens.
        p: Their probability.
        left: What of the end of the text, as the vocabulary writes it, they do not yet spell.
        letters: What they spell, with any white space as one space.
        begun: Whether a word has begun or been continued behind the text.
        tokens: How many of them belong to that word.
        experts: (n,) summed over the positions that chose these; None without a router.
        row: Of all but the last of these tokens, in the pass that came before.
    """

    ids: tuple[int, ...] = ()
    p: float = 1.0
    left: str = ""
    letters: str = ""
    begun: bool = False
    tokens: int = 0
    experts: Tensor | None = None
    row: int = 0


@dataclass
class Found:
    """A word that the search has met.

    Args:
        inserts: The probability of each way to append it to the text.
        experts: (n,) of its first spelling, see `Word`.
    """

    experts: tuple[float, ...]
    inserts: dict[str, float] = field(default_factory=dict)

    @property
    def p(self) -> float:
        return sum(self.inserts.values())


class Search:
    """What is found so far for one text.

    Args:
        text: What was written so far.
        end: The tokens of the text that are taken back, as the vocabulary writes them.
        written: The same, decoded.
        depth: How many tokens are looked at behind the prompt.
        k: How many words are wanted at most.
    """

    def __init__(self, text: str, end: str, written: str, depth: int, k: int) -> None:
        self.text, self.end, self.written, self.depth, self.k = text, end, written, depth, k
        self.beam = max(BEAM, 2 * k)
        self.level = [Beginning(left=end)]
        self.mass = 0.0 if end else 1.0  # of what begins with the end of the text
        self.found: dict[tuple[str, bool], Found] = {}

    @property
    def within(self) -> bool:
        """Whether the text may end within a word."""
        return bool(self.end) and self.end[-1] not in SPACES

    def prune(self) -> int:
        """Keep the beginnings that may still be among the best words, or say how likely the
        text's end is. Returns how many.
        """
        best = sorted((candidate.p for candidate in self.found.values()), reverse=True)
        least = best[self.k - 1] if len(best) >= self.k else 0.0
        level = sorted((b for b in self.level if len(b.ids) < self.depth), key=lambda b: -b.p)
        together: dict[str, float] = {}  # spellings of one word may be among the best by their sum
        for b in level:
            together[b.letters] = together.get(b.letters, 0.0) + b.p
        words = [b for b in level if not b.left and together[b.letters] > least]
        spelling = [b for b in level if b.left and b.p > RARE * self.mass]
        self.level = words[: self.beam] + spelling[: self.beam]
        return len(self.level)

    def last(self, rows: int, filling: int) -> list[int]:
        """Return the beginnings' last tokens, and up to so many rows something else."""
        return [b.ids[-1] for b in self.level] + [filling] * (rows - len(self.level))

    def before(self, rows: int) -> list[int]:
        """In which row of the pass before the beginnings' other tokens were."""
        return [b.row for b in self.level] + [0] * (rows - len(self.level))

    def note(self, piece: str, b: Beginning, p: float) -> None:
        """Add a complete word, or another spelling of one; `piece` is what its tokens say."""
        insert = piece.removeprefix(self.written)
        if not any(c.isalnum() for c in insert) or "\ufffd" in piece:
            return
        new = not self.within or insert[0].isspace()
        blank = not self.text.strip() or self.text[-1].isspace()
        word = insert.strip()
        insert = " " + word if insert[0].isspace() and not blank else word
        shown = word if new else last_word(self.text) + word
        experts = () if b.experts is None else tuple((b.experts / b.tokens).tolist())
        inserts = self.found.setdefault((shown, new), Found(experts)).inserts
        inserts[insert] = inserts.get(insert, 0.0) + p

    def best(self) -> list[Word]:
        """Return the best words, none of which reads as another one."""
        words: dict[str, Word] = {}
        for (shown, _), candidate in sorted(self.found.items(), key=lambda item: -item[1].p):
            insert = max(candidate.inserts, key=candidate.inserts.__getitem__)
            words.setdefault(shown, Word(shown, insert, candidate.p / self.mass, candidate.experts))
        return list(words.values())[: self.k]


def last_word(text: str) -> str:
    """Return the letters that a text ends with: "(some sock" -> "sock"."""
    size = next(
        (i for i, c in enumerate(reversed(text)) if c.isspace() or c in PUNCTUATION), len(text)
    )
    return text[len(text) - size :]
