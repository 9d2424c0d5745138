"""Results with types: what is in a run's `result.json` and `routing.json`, and in a
comparison's `comparison.json`.
"""

from coterie.core.result.comparison import Comparison, Row
from coterie.core.result.evaluation import BestByValid, Choices, Curve, Evaluation, Scores
from coterie.core.result.parsing import Json, Machine, MetricInfo, PrivacySpent, Versions
from coterie.core.result.routing import ROUTING, Mixture, Routing
from coterie.core.result.run import RESULT, ClientResult, Costs, Result, headline

__all__ = [
    "RESULT",
    "ROUTING",
    "BestByValid",
    "Choices",
    "ClientResult",
    "Comparison",
    "Costs",
    "Curve",
    "Evaluation",
    "Json",
    "Machine",
    "MetricInfo",
    "Mixture",
    "PrivacySpent",
    "Result",
    "Routing",
    "Row",
    "Scores",
    "Versions",
    "headline",
]
