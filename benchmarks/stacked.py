"""What several clients' batches in one pass through the frozen base could save at most.

    python benchmarks/stacked.py [--clients 4] [--threads 1] [--repeats 5] [--json FILE]

Random weights of the embedded base and of GPT-2's width (four blocks). One step of `--clients`
times as many rows against as many steps one after the other, in processor time, all with one and
the same adapter (1G1S): what low-rank parts of their own would cost on top is left out, so that
`one by one / together` is a bound from above.
"""

import argparse
import time
from pathlib import Path

import torch
from common import RESULTS, in_turns, ratios, report
from local_step import base

from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

# base, rows of a client's batch, context
SHAPES = (
    ("embedded", 16, 128),
    ("embedded", 4, 64),
    ("embedded", 1, 32),
    ("gpt2", 8, 128),
    ("gpt2", 2, 128),
    ("gpt2", 1, 32),
)


def row(shape: str, rows: int, context: int, clients: int, repeats: int) -> dict[str, object]:
    backbone = Backbone(base(shape, 4))
    model = LanguageModel(backbone, Layout())
    roles = model.parameters_by_role
    own = [*roles[GENERALIST].values(), *roles[SPECIALIST].values()]
    batch = torch.randint(backbone.architecture.vocabulary, (clients * rows, context + 1))

    def one_by_one() -> None:
        for part in torch.split(batch, rows):
            model.gradient(part, own)

    work = {"together": lambda: model.gradient(batch, own), "one by one": one_by_one}
    found = ratios(in_turns(work, repeats, clock=time.process_time), "together")
    return {
        "base": shape,
        "rows of a client": rows,
        "context": context,
        "clients": clients,
        "together, s": found["together"]["seconds"],
        "one by one, s": found["one by one"]["seconds"],
        "one by one / together": found["one by one"]["ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "stacked.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = [row(*shape, args.clients, args.repeats) for shape in SHAPES]
    report(rows, args.json)


if __name__ == "__main__":
    main()
