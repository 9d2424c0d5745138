"""`report.html` of a run: one self-contained file that works offline."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.methods import METHODS
from coterie.tensors import write_atomically

# Okabe and Ito's colours, which colour-blind people tell apart; they hold on a light and on a dark ground.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#808080"  # of axes and labels, legible on both grounds

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --ground: #fff; --best: #eaf3fb }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d; --ground: #0d1117; --best: #14283c }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 70rem; margin: 2rem auto }
body { padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
p { color: var(--soft); margin: .3rem 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
thead th { color: var(--soft); font-weight: 500 }
tr.best { background: var(--best); font-weight: 600 }
svg { max-width: 100%; height: auto }
"""


def write_report(folder: Path, results: Sequence[Mapping[str, Any]], description: str) -> None:
    """Write `report.html` into a run's folder.

    Args:
        folder: The run's folder.
        results: What is in result.json of each method, the run's own last.
        description: Of the recipe.

    Raises:
        SaveError: It could not be written.
    """
    own = results[-1]
    title = f"{own['recipe']}: {METHODS[own['method']].title}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(description)}</p>",
        f"<p>seed {own['seed']}, {own['rounds']} rounds, {own['machine']['device']}, {own['machine']['dtype']}, "
        f"coterie {own['versions']['coterie']}, torch {own['versions']['torch']}</p>",
        "<h2>Test perplexity</h2>",
        "<p>Over each client's whole test set; lower is better. <em>mean</em> and the clients' columns score each client's model right "
        "after its last local iteration, <em>synced</em> after one more synchronisation.</p>",
        _scores(results),
        "<h2>Test perplexity over training</h2>",
        _curves(results),
        "<h2>What it cost</h2>",
        "<p>Per client; bytes are those of the tensors in training messages, one way.</p>",
        _costs(results),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{"".join(body)}</body></html>'
    )
    write_atomically(folder / "report.html", page.encode())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = (
        f"<tr{' class=best' if i == best else ''}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _scores(results: Sequence[Mapping[str, Any]]) -> str:
    clients = list(results[-1]["clients"])
    rows = [
        [METHODS[r["method"]].title, f"{r['mean']:.2f}", *(f"{r['clients'][i]['test']:.2f}" for i in clients), f"{r['mean_synced']:.2f}"]
        for r in results
    ]
    best = min(range(len(results)), key=lambda k: results[k]["mean"])
    return _table(["method", "mean", *clients, "synced"], rows, best)


def _costs(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in results:
        clients, rounds = r["clients"].values(), max(r["rounds"], 1)
        keys = ("bytes_up", "bytes_down", "trainable_parameters", "flops_per_token")
        up, down, size, work = (sum(c[k] for c in clients) / len(clients) for k in keys)
        rows.append(
            [
                METHODS[r["method"]].title,
                f"{size:,.0f}",
                f"{work / 1e6:,.2f}",
                f"{up / rounds / 1000:,.1f}",
                f"{down / rounds / 1000:,.1f}",
                f"{r['wall_s']:,.0f}",
            ]
        )
    return _table(
        ["method", "trainable parameters", "MFLOPs per token, forward", "kB up per round", "kB down per round", "seconds, all clients"],
        rows,
    )


def _curves(results: Sequence[Mapping[str, Any]]) -> str:
    """One panel per client: test perplexity against local iterations, one line per method; a method without training is a level line."""
    from matplotlib.figure import Figure

    clients = list(results[-1]["clients"])
    columns = min(4, len(clients))
    rows = -(-len(clients) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, client in zip(axes, clients, strict=False):
        # Every adapter starts as no change at all, so that all curves begin where the base stands.
        start = [(0, r["clients"][client]["test"]) for r in results if r["rounds"] == 0][:1]
        for colour, result in zip(COLOURS, results, strict=False):
            points = start + [(e["iteration"], e["clients"][client]["test"]) for e in result["evaluations"]]
            label = METHODS[result["method"]].title
            if result["rounds"] == 0:
                axis.axhline(points[0][1], color=colour, linestyle=":", label=label)
            else:
                axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=label)
        axis.set_xlim(left=0)
        axis.set_title(client, color=GREY, fontsize=10)
        axis.set_xlabel("local iterations", color=GREY)
        axis.tick_params(colors=GREY, which="both")
        for spine in axis.spines.values():
            spine.set_color(GREY)
    for axis in axes[len(clients) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("test perplexity", color=GREY)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(results), frameon=False, labelcolor=GREY)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
