"""What noise from AES-256 on a grid costs against PyTorch's generator, which has 2^32 streams and
is none for secrets.

    python benchmarks/noise.py [--repeats 20] [--json benchmarks/results/noise.json]

One thread; d values in 32 tensors of float32, eight clients. `before` clips and adds torch.randn to
each reply, as coterie did until 0.1.
"""

import argparse
import math
from pathlib import Path

import torch
from common import in_turns, ratios, report

from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Privacy, central, clipped, local
from coterie.core.tensors import Named, Tensors

SIZE, TENSORS, CLIENTS = 156_160, 32, 8  # d of comigs-1g1s on the embedded base


def before(
    reply: Named, sent: Named, clip: float, deviation: float, generator: torch.Generator
) -> Tensors:
    """A reply with noise of PyTorch's generator."""
    cut = clipped(reply, sent, clip)[0]
    return {
        name: t + deviation * torch.randn(t.shape, generator=generator)
        for name, t in sorted(cut.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    sent = {f"t{k}": torch.randn(SIZE // TENSORS, generator=random) for k in range(TENSORS)}
    replies = {
        f"c{i}": {
            name: t + 0.01 * torch.randn(t.shape, generator=random) for name, t in sent.items()
        }
        for i in range(CLIENTS)
    }
    to = dict.fromkeys(replies, sent)
    one, all_of_them = (
        Privacy(where="local", clip=1.0, noise=1.0),
        Privacy(where="central", clip=1.0, noise=1.0),
    )
    part = 1 / math.sqrt(CLIENTS)
    work = {
        "local, before": lambda: before(replies["c0"], sent, 1.0, 1.0, random),
        "local": lambda: local(replies["c0"], sent, one, Source.secret()),
        "central, before": lambda: [
            before(reply, sent, 1.0, part, random) for reply in replies.values()
        ],
        "central": lambda: central(replies, to, all_of_them, 1.0, Source.secret()),
        "values, before (torch.randn)": lambda: torch.randn(SIZE, generator=random),
        "values": lambda: Source.secret().gaussian(SIZE, 2.0**20),
    }
    taken = in_turns(work, options.repeats)
    rows = []
    for name in ("local", "central", "values"):
        former = next(other for other in work if other.startswith(f"{name}, before"))
        found = ratios({key: taken[key] for key in (former, name)}, former)
        rows.append(
            {
                "what": name,
                "before, ms": 1e3 * found[former]["seconds"],
                "now, ms": 1e3 * found[name]["seconds"],
            }
        )
        rows[-1] |= {
            "ratio": found[name]["ratio"],
            "ratio of the fastest": found[name]["best_ratio"],
        }
    report(rows, options.json, values=SIZE, clients=CLIENTS)


if __name__ == "__main__":
    main()
