"""Results with types: what is in a run's `result.json`, `routing.json` and `audit.json`,
in a comparison's `comparison.json`, and in a search's `tune.json`.
"""

from coterie.core.result.audit import (
    AUDITED,
    AuditResult,
    AuditSettings,
    CanaryResult,
    CanarySetup,
    EpsilonBound,
    Estimate,
    Exposure,
    MembershipResult,
    ObserverResult,
    TruePositiveRate,
    WordExample,
    WordsResult,
)
from coterie.core.result.comparison import Comparison, Row
from coterie.core.result.evaluation import (
    ROUTING,
    BestByValid,
    Choices,
    Curve,
    Evaluation,
    Mixture,
    Routing,
    Scores,
)
from coterie.core.result.parsing import Json, Machine, MetricInfo, PrivacySpent, Versions
from coterie.core.result.run import RESULT, ClientResult, Costs, Result, headline
from coterie.core.result.tuning import ROUNDS, TUNING, Tried, TunedRow, Tuning

__all__ = [
    "AUDITED",
    "RESULT",
    "ROUNDS",
    "ROUTING",
    "TUNING",
    "AuditResult",
    "AuditSettings",
    "BestByValid",
    "CanaryResult",
    "CanarySetup",
    "Choices",
    "ClientResult",
    "Comparison",
    "Costs",
    "Curve",
    "EpsilonBound",
    "Estimate",
    "Evaluation",
    "Exposure",
    "Json",
    "Machine",
    "MembershipResult",
    "MetricInfo",
    "Mixture",
    "ObserverResult",
    "PrivacySpent",
    "Result",
    "Routing",
    "Row",
    "Scores",
    "Tried",
    "TruePositiveRate",
    "TunedRow",
    "Tuning",
    "Versions",
    "WordExample",
    "WordsResult",
    "headline",
]
