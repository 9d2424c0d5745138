"""Pictures of the classes of each client, and of K-means on them (DDOME, Fig. 2 and 11)."""

from collections.abc import Iterable, Sequence
from html import escape

from coterie.core.errors import extra
from coterie.core.extras import available
from coterie.core.result import Result
from coterie.reports import marks
from coterie.reports.chart import look_of
from coterie.reports.heat import Heat, heat_map, scale
from coterie.reports.marks import Dot
from coterie.reports.parts import captioned, unseen

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
    """Return a heat map of the share of each class for each kind of client: anchors, normal
    clients, and the groups of unseen ones (Fig. 2).
    """
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
            kinds.setdefault(
                unseen(result.clients[i].group or "") if i in result.clients else "normal clients",
                [],
            ).append(i)
    return {f"{len(members)} {kind}": members for kind, members in kinds.items() if members}


def anchored_classes(result: Result) -> list[Sequence[int]]:
    """Return the classes of each anchor."""
    labels = result.labels or {}
    return [labels[q] for q in result.anchors or ()]


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
