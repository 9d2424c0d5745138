"""What an audit of a run measured, as in `audit.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coterie.core.result.parsing import PrivacySpent, Record

AUDITED = "audit.json"  # of a run that was audited


@dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A number and its interval.

    Args:
        value: The number.
        low: The interval begins here.
        high: It ends here.
        interval: What kind of interval it is, for people.
    """

    value: float
    low: float
    high: float
    interval: str


@dataclass(frozen=True, kw_only=True)
class Exposure(Estimate):
    """The mean exposure of planted canaries, bits.

    Args:
        chance: The value that guessing would give.
        most: The exposure of a canary that ranks before all others.
    """

    chance: float
    most: float


@dataclass(frozen=True, kw_only=True)
class TruePositiveRate(Estimate):
    """The share of the members that an observer finds.

    Args:
        fpr: The false positive rate: at most this share of the others is mistaken for members.
    """

    fpr: float


@dataclass(frozen=True, kw_only=True)
class EpsilonBound(Record):
    """A lower bound on epsilon, from guesses of which canaries were planted.

    Args:
        at_least: Every smaller epsilon is refuted; 0 if none is.
        confidence: Of the refutation.
        delta: Of the guarantee that is tested.
        right: Guesses that are right.
        guesses: All guesses.
        coins: Candidates, each planted by the toss of a coin.
        most: The largest bound that this number of coins could have shown.
    """

    at_least: float
    confidence: float
    delta: float
    right: int
    guesses: int
    coins: int
    most: float


@dataclass(frozen=True, kw_only=True)
class CanaryResult(Record):
    """How well an observer finds canaries.

    Args:
        exposure: Of the planted ones.
        auc: Of planted canaries against those left out; None if a client has only one of the two.
        epsilon: The lower bound that follows.
    """

    exposure: Exposure
    auc: Estimate | None
    epsilon: EpsilonBound


@dataclass(frozen=True, kw_only=True)
class MembershipResult(Record):
    """How well rows that clients trained on can be told from others.

    Args:
        auc: Of all clients' rows, with one threshold for all.
        tpr: Members found at a low rate of false alarms.
        clients: The AUC of each client's rows.
        members: Rows trained on.
        others: Rows of test splits.
    """

    auc: Estimate
    tpr: TruePositiveRate
    clients: Mapping[str, float]
    members: int
    others: int


@dataclass(frozen=True, kw_only=True)
class ObserverResult(Record):
    """What one observer can tell.

    Args:
        exchanges: Number of exchanges that it saw, at most of one client.
        membership: By the likelihood ratio.
        min_k: By Min-K%++; None without text.
        canaries: None without canaries.
    """

    exchanges: int
    membership: MembershipResult
    min_k: MembershipResult | None
    canaries: CanaryResult | None


@dataclass(frozen=True, kw_only=True)
class WordExample(Record):
    """A rare word that the model of another client suggests.

    Args:
        word: As it stands in the text.
        owner: The only client that has it.
        prompt: The end of the text before it.
        by: The clients whose models suggest it.
        shared: Whether the shared part alone suggests it.
    """

    word: str
    owner: str
    prompt: str
    by: Sequence[str]
    shared: bool


@dataclass(frozen=True, kw_only=True)
class WordsResult(Record):
    """How often models suggest, at its place in the text, a word that only one client has.

    Args:
        words: Number of words that the base does not suggest.
        known_to_the_base: Number of words that it suggests; they are not counted.
        others: The rate of other clients' models; this and the other rates are None without words.
        shared: The rate of the shared part alone.
        owner: The rate of the client's own model.
        control: The rate of other clients' models, of words that nobody trained on.
        control_words: How many these are.
        examples: Some of what others suggest.
    """

    words: int
    known_to_the_base: int
    others: Estimate | None
    shared: Estimate | None
    owner: Estimate | None
    control: Estimate | None
    control_words: int
    examples: tuple[WordExample, ...]


@dataclass(frozen=True, kw_only=True)
class CanarySetup(Record):
    """The canaries of a run.

    Args:
        candidates: Of all clients.
        planted: How many of them are in training data.
        repeats: How often each planted one is repeated.
        prefix: Number of tokens with which all of them begin.
        length: Random tokens of each.
    """

    candidates: int
    planted: int
    repeats: int
    prefix: int
    length: int


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Record):
    """The extent of an audit.

    Args:
        windows: Training windows, and as many test windows, of each client, at most.
        words: Rare words of each client, at most.
        top: Number of suggestions in which a word is looked for.
        seed: Of all random choices of the audit.
    """

    windows: int
    words: int
    top: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class AuditResult(Record):
    """What is in `audit.json`.

    Args:
        recipe: Its name.
        method: Its name.
        seed: Of the run.
        round: Rounds done.
        clients: The clients whose data were audited.
        data: What rows are: `windows` of text, or `examples`.
        canaries: None without canaries.
        secure: Whether the audit assumes that the server sees only sums.
        privacy: What the run has spent; None without differential privacy.
        observers: By name: `server` and `others`.
        shift: How well the rows are told apart without any trained model.
        words: Rare words in suggestions; None if no model suggests words.
        settings: The extent of the audit.
    """

    file: ClassVar[str] = AUDITED
    remedy: ClassVar[str] = "Run `coterie audit RUN` with this version: it writes a new file."

    recipe: str
    method: str
    seed: int
    round: int
    clients: Sequence[str]
    data: str
    canaries: CanarySetup | None
    secure: bool
    privacy: PrivacySpent | None
    observers: Mapping[str, ObserverResult]
    shift: MembershipResult
    words: WordsResult | None
    settings: AuditSettings
