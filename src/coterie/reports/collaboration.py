"""Pictures of collaboration weights: W over training, and the true clusters (CoBo, Fig. 3-5)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from coterie.core.result import Result
from coterie.reports import chart, heat
from coterie.reports.chart import Line, Style, look_of
from coterie.reports.heat import Heat, Matrix
from coterie.reports.parts import GREY, captioned, escape, folded, legend, thinned

CLIENTS = 8  # panels, and lines of a panel, at most
FAINT = 0.45  # the strength of lines to clients of other clusters
ABOUT = (
    "<p>The weight that the client of a row gives to the client of a column{order}; its weight for "
    "itself is left out. Move the slider, or use the arrow keys, to step through training. Hover "
    "over a field, tap it, or reach it with Tab and the arrow keys, to see its weight.</p>"
)


@dataclass(frozen=True)
class Weights:
    """The weights of one method at its evaluations."""

    title: str
    clients: Sequence[str]  # in the order of the pictures: by cluster, if clusters are known
    clusters: Sequence[int] | None  # the true ones; None if unknown
    # local iterations, and w_ij (n, n) after them, in that order
    stages: Sequence[tuple[int, Matrix]]
    error: float | None = None  # W error at the end

    @classmethod
    def of(cls, title: str, result: Result) -> "Weights | None":
        """Return the weights of a result, or None if its method has none."""
        evaluations = [(e.iteration, e.weights) for e in result.evaluations if e.weights]
        clients, known = list(result.training or result.clients), result.clusters
        order = [k for k, i in enumerate(clients) if i in result.clients]  # some may be scored
        if not evaluations or len(order) < 2:
            return None
        if known:
            order.sort(key=lambda k: known[clients[k]])
        stages = [
            (at, [[w[i][j] for j in order] for i in order])
            for at, w in thinned(evaluations, heat.room(len(order) ** 2))
        ]
        clusters = [known[clients[k]] for k in order] if known else None
        return cls(title, [clients[k] for k in order], clusters, stages, result.weights_error)

    @cached_property
    def top(self) -> float:
        """The end of the scale: the largest weight between two clients, rounded up."""
        largest = max(w for _, matrix in self.stages for w in self.between(matrix))
        return next((limit for limit in (0.1, 0.2, 0.5) if largest <= limit), 1.0)

    @staticmethod
    def between(matrix: Matrix) -> Iterator[float]:
        """Return all weights except those of clients for themselves."""
        return (matrix[i][j] for i, j in permutations(range(len(matrix)), 2))

    @cached_property
    def truth(self) -> Matrix | None:
        """The true clusters as weights: the end of the scale within a cluster, else 0."""
        if self.clusters is None:
            return None
        return [[self.top * (a == b) for b in self.clusters] for a in self.clusters]

    def inside(self, matrix: Matrix) -> float:
        """Return the share of the weight between clients that is within true clusters, or 0."""
        assert self.clusters is not None
        total = sum(self.between(matrix))
        within = sum(
            matrix[i][j]
            for i, j in permutations(range(len(matrix)), 2)
            if self.clusters[i] == self.clusters[j]
        )
        return within / total if total else 0.0

    def nearest(self, iterations: Sequence[int]) -> list[tuple[int, Matrix]]:
        """Return the stages nearest to the given iterations; by default five, evenly spread."""
        if not iterations:
            return thinned(self.stages, 5)
        indices = {
            min(range(len(self.stages)), key=lambda k: abs(self.stages[k][0] - at))
            for at in iterations
        }
        return [self.stages[k] for k in sorted(indices)]


def collaboration(results: Mapping[str, Result]) -> tuple[str, ...]:
    """Return the parts of the section: heat maps with a slider, the share of weight within true
    clusters, and weights over time, those of the first result shown at once. () without weights.
    """
    all_weights = [w for title, result in results.items() if (w := Weights.of(title, result))]
    if not all_weights:
        return ()
    first, *others = all_weights
    over_time = f"<h3>{escape(first.title)}: weights over training</h3>{domains(first)}" + "".join(
        folded(f"{w.title}: weights over training", domains(w)) for w in others
    )
    order = ", ordered by true cluster; frames show the clusters" if first.clusters else ""
    return ABOUT.format(order=order), _maps(all_weights), shares(all_weights), over_time


def _maps(all_weights: Sequence[Weights]) -> str:
    """Return a heat map for each method, with its stages for the script, and the true clusters."""
    moments = sorted({at for w in all_weights for at, _ in w.stages})
    alike = len({w.top for w in all_weights}) == 1
    figures = []
    for w in all_weights:
        error = "" if w.error is None else f"W error {w.error:.2f} at the end"
        drawn = heat_map(w, w.stages) + ("" if alike else scale(w.top))
        figures.append(captioned(w.title, error, drawn))
    figures += _truth(all_weights[0])
    slider = heat.slider(moments, "local iterations")
    legend = slider + (scale(all_weights[0].top) if alike else "")
    return f'<div class="staged">{legend}<div class="maps">{"".join(figures)}</div></div>'


def _truth(weights: Weights) -> list[str]:
    """Return a heat map of the true clusters, if they are known."""
    if weights.truth is None:
        return []
    return [captioned("True clusters", "", heat_map(weights, [(0, weights.truth)]))]


def scale(top: float) -> str:
    """Return the legend of the colours, with numbers."""
    return heat.scale("weight 0", f"{top:g}")


def heat_map(weights: Weights, stages: Sequence[tuple[int, Matrix]]) -> str:
    """Return W as fields of colour with paths around clusters; stages move by the slider."""
    names, clusters = weights.clients, list(weights.clusters or ())
    # clients of a cluster are neighbours
    blocks = ((clusters.index(c), clusters.count(c)) for c in dict.fromkeys(clusters))
    frames = "".join(f"M{start} {start}h{k}v{k}h{-k}z" for start, k in blocks)
    label = f"{weights.title}: weights of {len(names)} clients for each other"
    texts = label, "{row} takes {value} from {column}"
    matrix = Heat(names, names, stages, weights.top, *texts, masked=True, frames=frames)
    return heat.heat_map(matrix)


def at_stages(weights: Weights, iterations: Sequence[int]) -> str:
    """Return heat maps at some stages, and the true clusters, side by side."""
    figures = [
        captioned(f"{at:,} iterations", "", heat_map(weights, [(0, matrix)]))
        for at, matrix in weights.nearest(iterations)
    ]
    return f'<div class="maps small">{"".join(figures + _truth(weights))}</div>'


def shares(all_weights: Sequence[Weights]) -> str:
    """Return a panel of the weight within true clusters over training; "" if they are unknown."""
    known = [w for w in all_weights if w.clusters is not None]
    if not known:
        return ""
    lines = [
        Line(
            [(at, 100 * w.inside(matrix)) for at, matrix in w.stages],
            w.title,
            look_of(k, len(w.stages) <= chart.MARKED),
        )
        for k, w in enumerate(known)
    ]
    alike = known[0].inside([[1.0] * len(known[0].clients)] * len(known[0].clients))
    last = max(at for w in known for at, _ in w.stages)
    level = [(0, 100 * alike), (last, 100 * alike)]
    lines.append(Line(level, "if all weights were equal", Style(GREY, 2, marked=False)))
    drawn = chart.panels({"All clients": lines}, "local iterations", "% of all weight", (0, 100))
    return f"<h3>Weight within the true clusters</h3>{chart.samples(lines)}{drawn}"


def domains(weights: Weights, clients: Sequence[str] = ()) -> str:
    """Return a panel for each client, by default the first `CLIENTS`: its weights over training."""
    names, known = weights.clients, weights.clusters
    places = [k for k, name in enumerate(names) if name in clients or not clients][:CLIENTS]
    charts: dict[str, list[Line]] = {}
    drawn: dict[int, Style] = {}
    for i in places:
        totals = [sum(w[i][j] for _, w in weights.stages) for j in range(len(names))]
        others = sorted((j for j in range(len(names)) if j != i), key=lambda j: -totals[j])
        for j in sorted(others[:CLIENTS]):
            drawn[j] = look = look_of(j, marked=False)
            if known is not None and known[i] != known[j]:
                look = replace(look, strength=FAINT)
            points = [(at, matrix[i][j]) for at, matrix in weights.stages]
            charts.setdefault(names[i], []).append(Line(points, f"for {names[j]}", look))
    samples = legend((drawn[j].sample, names[j]) for j in sorted(drawn))
    remarks = {
        f"{len(places)} of {len(names)} clients.": len(places) < len(names) and not clients,
        f"Lines to the {CLIENTS} others with the largest weight.": len(names) - 1 > CLIENTS,
        "Lines to clients of the same true cluster are strong, the others faint.": bool(known),
    }
    shown = "".join(f"<p class=note>{text}</p>" for text, holds in remarks.items() if holds)
    shown += samples if len(drawn) <= 2 * CLIENTS else ""
    return shown + chart.panels(charts, "local iterations", "weight", (0, weights.top))
