"""Pictures of the classes of each client, of K-means on them (DDOME, Fig. 2 and 11), and of a pool
of experts: the classes that a gate sends to each (Fig. 7, Table 5).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from statistics import fmean

from coterie.core.errors import extra
from coterie.core.importing import available
from coterie.core.result import Choices as GateChoices
from coterie.core.result import Result
from coterie.reports import chart, marks
from coterie.reports.chart import Line, Style, look_of
from coterie.reports.heat import Heat, heat_map, room, runs, scale, slider
from coterie.reports.marks import Dot
from coterie.reports.parts import captioned, escape, folded, known, table, thinned, unseen

CLUSTERS = 5  # clusters of K-means if there are no anchors
# upper limits of the mean silhouette (Kaufman and Rousseeuw, 1990)
SUBSTANTIAL = {"no clear groups": 0.25, "weak groups": 0.5, "groups": 1.0}

ABOUT_CLASSES = (
    "<p>Columns are clients, rows are classes. A field is the class's share of the "
    "client's training examples, or of an unseen client's test examples. Classes of one anchor "
    "are next to each other.</p>"
)


def classes(result: Result) -> tuple[str, ...]:
    """Return the section on labels: clients' classes, and K-means; () if labels are unknown."""
    return (ABOUT_CLASSES, distribution(result), clustering(result)) if result.label_counts else ()


def distribution(result: Result) -> str:
    """Return a heat map of the shares of classes for each kind of client (Fig. 2)."""
    shares = {i: percentages(counts) for i, counts in (result.label_counts or {}).items()}
    order = class_order(len(next(iter(shares.values()))), anchored_classes(result))
    top = max(map(max, shares.values()))
    figures = []
    for kind, members in _kinds(result).items():
        matrix = [[shares[i][c] for i in members] for c in order]
        rows, tooltip = list(map(str, order)), "{column}: {value} % of class {row}"
        label = f"Shares of classes of {kind}"
        heat = Heat(rows, members, [(0, matrix)], top, label, tooltip, digits=0)
        figures.append(captioned(kind, "", heat_map(heat, 900, 450, field=16)))
    return f'{scale("0 % of a client", f"{top:.0f} %")}<div class="kinds">{"".join(figures)}</div>'


def _kinds(result: Result) -> dict[str, list[str]]:
    """Return clients with examples by kind, with their number in the title, unseen groups last."""
    kinds: dict[str, list[str]] = {"anchors": list(result.anchors or ()), "normal clients": []}
    for i in result.label_counts or ():
        if i not in kinds["anchors"]:
            group = result.clients[i].group or "" if i in result.clients else None
            kinds.setdefault("normal clients" if group is None else unseen(group), []).append(i)
    return {f"{len(members)} {kind}": members for kind, members in kinds.items() if members}


def anchored_classes(result: Result) -> list[Sequence[int]]:
    """Return the classes of each anchor."""
    return [(result.labels or {})[q] for q in result.anchors or ()]


def class_order(count: int, anchored: Sequence[Sequence[int]]) -> list[int]:
    """Return the classes in order: those of each anchor side by side, then those of no anchor."""
    return list(dict.fromkeys(c for group in (*anchored, range(count)) for c in group))


def percentages(counts: Iterable[int]) -> list[float]:
    """Return the percentage of each count; zeros if all are zero."""
    held = list(counts)
    return [100 * count / (sum(held) or 1) for count in held]


def clustering(result: Result) -> str:
    """Return a picture of K-means on the label shares of the normal clients, in their first two
    principal components (Fig. 11); "" if there are too few clients.
    """
    if not available("sklearn"):
        return f"<p>K-means on these shares needs scikit-learn: {escape(extra('vision'))}</p>"
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.metrics import silhouette_score

    counts, anchors = result.label_counts or {}, result.anchors or ()
    trains = [i for i in counts if i not in result.clients and i not in anchors]
    shares = [percentages(counts[i]) for i in trains]
    k = len(anchors) or CLUSTERS
    if not 1 < k < len(set(map(tuple, shares))):
        return ""
    clusters = KMeans(k, n_init=10, random_state=0).fit_predict(shares)
    silhouette = float(silhouette_score(shares, clusters))
    components = PCA(2).fit(shares)
    dots = []
    for i, client_shares, cluster, (x, y) in zip(
        trains, shares, clusters.tolist(), components.transform(shares).tolist(), strict=True
    ):
        two = sorted(sorted(range(len(client_shares)), key=lambda c: -client_shares[c])[:2])
        main = "·".join(map(str, two))
        dots.append(
            Dot(x, y, main, f"{i}: cluster {cluster + 1}, main classes {main}", look_of(cluster))
        )
    parts = zip(("first", "second"), components.explained_variance_ratio_.tolist(), strict=True)
    axes = (
        f"{name} principal component ({100 * part:.0f} % of the variance)" for name, part in parts
    )
    verdict = next(says for says, limit in SUBSTANTIAL.items() if silhouette <= limit)
    return (
        f"<h3>K-means on these shares finds {verdict}</h3><p>The {len(trains)} normal clients "
        f"with their two main classes; colour and shape show the cluster, of {k}. The mean "
        f"silhouette is {silhouette:.2f}: 1 means groups far apart, 0 groups that touch, and up "
        f"to 0.25 no substantial structure.</p>{marks.plane(dots, *axes)}"
    )


ABOUT_CHOICES = (
    "<p>Test samples, {whose}: the share of each row that the gate sent to each "
    "expert (columns).{outlined} Move the slider, or use the arrow keys, to step through "
    "training. Hover over a field, tap it, or reach it with Tab and the arrow keys, to see its "
    "share.</p>"
)
ABOUT_GATE = "<p>The share of samples sent to an expert whose anchor has their class.</p>"

ABOUT_ACCURACY = "<p>The share of the samples sent to an expert that it classified correctly.</p>"
ABOUT_DECISIONS = (
    "<p>Test samples that the gate sent to an expert whose anchor does not have, or has, their "
    "class.</p>"
)


@dataclass(frozen=True)
class Choices:
    """The experts that a method's gate chose for test samples, at its evaluations."""

    title: str
    anchored: Sequence[Sequence[int]]  # the classes of each expert's anchor; () without anchors
    # rounds, and the choices after them by group of clients, the headline first
    stages: Sequence[tuple[int, Mapping[str, GateChoices]]]

    @classmethod
    def of(cls, title: str, result: Result) -> "Choices | None":
        """Return the choices of a result, or None if its method has no gate."""
        evaluations = [(e.round, e.choices) for e in result.evaluations if e.choices]
        if not evaluations:
            return None
        given = next(iter(evaluations[0][1].values())).given
        stages = thinned(evaluations, room(len(given) * len(given[0])))
        anchored = anchored_classes(result)
        return cls(title, anchored if len(anchored) == len(given[0]) else (), stages)

    @property
    def groups(self) -> list[str]:
        """The groups of clients, the headline first."""
        return list(self.stages[-1][1])

    @property
    def size(self) -> tuple[int, int]:
        """The number of classes, and the number of experts M."""
        given = self.stages[-1][1][self.groups[0]].given
        return len(given), len(given[0])

    @property
    def marked(self) -> bool:
        """Whether curves have markers."""
        return len(self.stages) <= chart.MARKED

    @cached_property
    def order(self) -> list[int]:
        """The classes, from the top."""
        return class_order(self.size[0], self.anchored)

    def shares(self, group: str) -> Heat:
        """Return the percentage of each class that each expert was given, (classes, M)."""
        stages = [
            (at, [percentages(choices[group].given[c]) for c in self.order])
            for at, choices in self.stages
        ]
        owned = [[c in classes for c in self.order] for classes in self.anchored]
        frames = "".join(
            f"M{m} {i}h1v{k}h-1z" for m, column in enumerate(owned) for i, k in runs(column)
        )
        rows, experts = list(map(str, self.order)), list(map(str, range(self.size[1])))
        texts = (
            f"{self.title}: share of each class by expert",
            "class {row}: {value} % to expert {column}",
        )
        return Heat(rows, experts, stages, 100, *texts, digits=0, frames=frames)

    def expert_accuracy(self, group: str) -> list[Line]:
        """Return a line for each expert: its accuracy on the samples that it was given, percent."""
        return [
            Line(
                [(at, _rate(choices[group], m)) for at, choices in self.stages],
                f"expert {m}",
                look_of(m, self.marked),
            )
            for m in range(self.size[1])
        ]

    def gate_accuracy(self, group: str, style: Style) -> Line:
        """Return the line of the percentage of samples of a class of their expert's anchor."""
        points = [(at, known(choices[group].gate_accuracy)) for at, choices in self.stages]
        return Line(points, self.title, style)


def _rate(choices: GateChoices, expert: int) -> float:
    """Return the accuracy of an expert on its samples, percent; nan without samples."""
    given, right = (sum(row[expert] for row in matrix) for matrix in (choices.given, choices.right))
    return 100 * right / given if given else nan


def experts(results: Mapping[str, Result]) -> tuple[str, ...]:
    """Return the parts of the section on a pool: choices over training, accuracy of experts and
    gate, and the decisions by client of the first method with a gate; () if none has one.
    """
    all_choices = [c for title, result in results.items() if (c := Choices.of(title, result))]
    if not all_choices:
        return ()
    tables = (decisions(title, result) for title, result in results.items())
    return (
        choice_maps(all_choices),
        gate_curves(all_choices),
        *map(expert_curves, all_choices),
        next(filter(None, tables), ""),
    )


def choice_maps(all_choices: Sequence[Choices]) -> str:
    """Return heat maps by class, one slider for all; other groups are folded away."""
    first, *others = all_choices[0].groups
    anchored = any(choices.anchored for choices in all_choices)
    outlined = " The classes of the expert's own anchor are outlined." * anchored
    about = ABOUT_CHOICES.format(whose=escape(unseen(first)), outlined=outlined)
    more = (folded(f"The same of {unseen(g)}", _staged_maps(all_choices, g)) for g in others)
    return about + _staged_maps(all_choices, first) + "".join(more)


def _staged_maps(all_choices: Sequence[Choices], group: str) -> str:
    """Return the heat maps of a group of clients, with their slider."""
    figures = [captioned(of.title, "by class", heat_map(of.shares(group))) for of in all_choices]
    moments = sorted({at for choices in all_choices for at, _ in choices.stages})
    legend = slider(moments, "rounds") + scale("0 % of the row", "100 %")
    return f'<div class="staged">{legend}<div class="maps owned">{"".join(figures)}</div></div>'


def gate_curves(all_choices: Sequence[Choices]) -> str:
    """Return a panel of gate accuracy by method for each group of clients; "" without anchors."""
    tied = {k: choices for k, choices in enumerate(all_choices) if choices.anchored}
    if not tied:
        return ""
    charts = {
        unseen(group): [c.gate_accuracy(group, look_of(k, c.marked)) for k, c in tied.items()]
        for group in all_choices[0].groups
    }
    samples = chart.samples(next(iter(charts.values()))) if len(tied) > 1 else ""
    panels = chart.panels(charts, "rounds", "gate accuracy, %", (0, 100))
    return f"<h3>Gate accuracy</h3>{ABOUT_GATE}{samples}{panels}"


def expert_curves(choices: Choices) -> str:
    """Return a panel for each group of clients: each expert's accuracy over rounds (Fig. 7)."""
    charts = {unseen(group): choices.expert_accuracy(group) for group in choices.groups}
    samples = chart.samples(charts[unseen(choices.groups[0])])
    panels = chart.panels(charts, "rounds", "accuracy, %")
    title = f"<h3>{escape(choices.title)}: accuracy of each expert</h3>"
    return f"{title}{ABOUT_ACCURACY}{samples}{panels}"


def decisions(title: str, result: Result) -> str:
    """Return the gate's decisions for each unseen client, with a table for each group, all but the
    first folded away (Table 5). "" if experts have no anchors, or no client is unseen.
    """
    counts, groups = result.label_counts, result.groups
    right = {i: c.gate_accuracy for i, c in result.clients.items()}
    if not counts or not groups or None in right.values():
        return ""
    tables = []
    for group in groups:
        chosen = {i: c.experts or () for i, c in result.clients.items() if c.group == group}
        wrong = {i: 1 - known(right[i]) / 100 for i in chosen}
        rows = []
        for i, w in wrong.items():
            incorrect, correct = (f"{sum(counts[i]) * share:.0f}" for share in (w, 1 - w))
            rows.append([i, ", ".join(map(str, chosen[i])), incorrect, correct, f"{100 * w:.1f} %"])
        rows.append(["average", "", "", "", f"{100 * fmean(wrong.values()):.1f} %"])
        header = [unseen(group), "experts", "incorrect", "correct", "error rate"]
        tables.append(table(header, rows, len(wrong)))
    first, *others = tables
    folds = "".join(folded(unseen(g), t) for g, t in zip(list(groups)[1:], others, strict=True))
    return f"<h3>{escape(title)}: decisions of the gate</h3>{ABOUT_DECISIONS}{first}{folds}"
