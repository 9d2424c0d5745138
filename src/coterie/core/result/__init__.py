"""Typed results: a run's `result.json` and `routing.json`, `comparison.json` and `tune.json`. Those
of audits are in `audit`.
"""

from coterie.core.result.parsing import (
    ROUTING,
    BestByValid,
    Choices,
    Curve,
    Evaluated,
    Evaluation,
    Json,
    Machine,
    MetricInfo,
    Mixture,
    PrivacySpent,
    Routing,
    Scores,
    Versions,
    WordScores,
)
from coterie.core.result.run import RESULT, ClientResult, Comparison, Costs, Result, Row, headline
from coterie.core.result.tuning import ROUNDS, TUNING, Tried, TunedRow, Tuning

__all__ = ["RESULT", "ROUNDS", "ROUTING", "TUNING", "BestByValid", "Choices", "ClientResult"]
__all__ += ["Comparison", "Costs", "Curve", "Evaluated", "Evaluation", "Json", "Machine"]
__all__ += ["MetricInfo", "Mixture", "PrivacySpent", "Result", "Routing", "Row", "Scores", "Tried"]
__all__ += ["TunedRow", "Tuning", "Versions", "WordScores", "headline"]
