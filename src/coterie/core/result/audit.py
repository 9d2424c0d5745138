"""What an audit of a run measured, as in `audit.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coterie.core.result.parsing import PrivacySpent, Record

AUDITED = "audit.json"  # of a run that was audited


@dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A number and its interval, from `low` to `high`."""

    value: float
    low: float
    high: float
    interval: str  # what kind of interval it is, for people


@dataclass(frozen=True, kw_only=True)
class Exposure(Estimate):
    """The mean exposure of planted canaries, bits."""

    chance: float  # what guessing would give
    most: float  # the exposure of a canary that ranks before all others


@dataclass(frozen=True, kw_only=True)
class TruePositiveRate(Estimate):
    """The share of the members that an observer finds."""

    fpr: float  # at most this share of the others is mistaken for members


@dataclass(frozen=True, kw_only=True)
class EpsilonBound(Record):
    """A lower bound on epsilon, from guesses of which canaries were planted."""

    at_least: float  # every smaller epsilon is refuted; 0 if none is
    confidence: float  # of the refutation
    delta: float  # of the guarantee that is tested
    right: int  # correct guesses
    guesses: int
    coins: int  # candidates, each planted by the toss of a coin
    most: float  # the largest bound that this number of coins could have shown


@dataclass(frozen=True, kw_only=True)
class CanaryResult(Record):
    """How well an observer finds canaries."""

    exposure: Exposure
    auc: Estimate | None  # planted against left-out canaries; None if a client lacks one kind
    epsilon: EpsilonBound


@dataclass(frozen=True, kw_only=True)
class MembershipResult(Record):
    """How well rows that clients trained on can be told from others."""

    auc: Estimate  # of all clients' rows, with one threshold for all
    tpr: TruePositiveRate  # at a low rate of false alarms
    clients: Mapping[str, float]  # the AUC of each client's rows
    members: int  # rows trained on
    others: int  # rows of test splits


@dataclass(frozen=True, kw_only=True)
class ObserverResult(Record):
    """What one observer can tell."""

    exchanges: int  # that it saw, at most of one client
    membership: MembershipResult  # by the likelihood ratio
    min_k: MembershipResult | None  # by Min-K%++; None without text
    canaries: CanaryResult | None


@dataclass(frozen=True, kw_only=True)
class WordExample(Record):
    """A rare word that the model of another client suggests."""

    word: str
    owner: str  # the only client whose text has it
    prompt: str  # the end of the text before it
    by: Sequence[str]  # the clients whose models suggest it
    shared: bool  # whether the shared part alone suggests it


@dataclass(frozen=True, kw_only=True)
class WordsResult(Record):
    """How often models suggest a word that only one client has, at its place in the text. Rates are
    None without words.
    """

    words: int  # that the base does not suggest
    known_to_the_base: int  # words that it suggests; they are not counted
    others: Estimate | None  # the rate of other clients' models
    shared: Estimate | None  # the rate of the shared part alone
    owner: Estimate | None  # the rate of the client's own model
    control: Estimate | None  # of other clients' models, on words that nobody trained on
    control_words: int
    examples: tuple[WordExample, ...]  # some of what others suggest


@dataclass(frozen=True, kw_only=True)
class CanarySetup(Record):
    """The canaries of a run."""

    candidates: int  # of all clients
    planted: int  # candidates that are in training data
    repeats: int  # of each planted one
    prefix: int  # tokens with which all of them begin
    length: int  # random tokens of each


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Record):
    """The extent of an audit."""

    windows: int  # of each client's training and test data, at most
    words: int  # rare words of each client, at most
    top: int  # suggestions in which a word is looked for
    seed: int


@dataclass(frozen=True, kw_only=True)
class AuditResult(Record):
    """The content of `audit.json`."""

    file: ClassVar[str] = AUDITED
    remedy: ClassVar[str] = "Run `coterie audit RUN` with this version: it writes a new file."

    recipe: str
    method: str
    seed: int
    round: int  # rounds done
    clients: Sequence[str]  # whose data were audited
    data: str  # `windows` of text, or `examples`
    canaries: CanarySetup | None
    secure: bool  # whether the audit assumes that the server sees only sums
    privacy: PrivacySpent | None
    observers: Mapping[str, ObserverResult]  # `server`, `others`, of mixtures `user`
    shift: MembershipResult  # how well rows are told apart without any trained model
    words: WordsResult | None  # None if no model suggests words
    settings: AuditSettings
