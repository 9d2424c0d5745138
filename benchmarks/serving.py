"""What `serve --api` does in a second: requests of many clients in one running batch, against as
many requests to one model, and against one after the other.

    python benchmarks/serving.py [--shape embedded gpt2] [--requests 32] [--rows 16] [--repeats 5]
    [--json FILE]

Every request is of another client; prompts have 4 to 64 tokens, answers 16 to 48, so that texts
join and leave all the time. Adapters are random; only the shapes matter. The variants take turns
within one process. `over HTTP` is the whole server with OpenAI's client in as many threads; all
others are the running batch alone. `throughput` is that of requests to one model. Seconds are those
of the processor, which a busy machine changes less; over HTTP they have OpenAI's client in them.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from common import RESULTS, in_turns, ratios, report
from next_token import base, personal

from coterie.models.architecture import EMBEDDED, locate
from coterie.models.backbone import Backbone
from coterie.models.layout import Layout
from coterie.personal import ManyModels
from coterie.personal.running_batch import Continuation, RunningBatch
from coterie.personal.sampling import Sampling

MANY, ALONE, AFTER = "of many clients", "to one model", "of many clients, one after the other"
EQUAL, HTTP = "of many clients, all as long", "of many clients, over HTTP"
PROMPTS, ANSWERS = (4, 64), (16, 48)  # tokens
TOKEN = "a-token-for-this-machine"


def requests(count: int, vocabulary: int, one: bool, equal: bool) -> list[Continuation]:
    """Prompts of all lengths, or all of the mean length."""
    rng = random.Random(0)
    lengths = [(rng.randint(*PROMPTS), rng.randint(*ANSWERS)) for _ in range(count)]
    if equal:
        lengths = [tuple(sum(sizes) // count for sizes in zip(*lengths, strict=True))] * count
    return [
        Continuation(
            str(0 if one else i), [rng.randrange(vocabulary) for _ in range(prompt)], answer, GREEDY
        )
        for i, (prompt, answer) in enumerate(lengths)
    ]


GREEDY = Sampling(temperature=0)


def batch(models: ManyModels, wanted: Sequence[Continuation], rows: int) -> Callable[[], None]:
    """Continue all prompts in a running batch of so many rows."""

    def work() -> None:
        running = RunningBatch(models, rows)
        for one in wanted:
            running.add(one)
        while running.busy:
            running.step()

    return work


def over_http(address: str, wanted: Sequence[Continuation]) -> Callable[[], None]:
    """Send all prompts at once by OpenAI's client, from a thread each."""
    import openai

    client = openai.OpenAI(base_url=address, api_key=TOKEN, timeout=600)

    def ask(one: Continuation) -> None:
        client.completions.create(
            model=one.client, prompt=one.prompt, max_tokens=one.most, temperature=0
        )

    def work() -> None:
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(ask, wanted))

    return work


def measured(shape: str, count: int, rows: int, repeats: int, stack: ExitStack) -> list[dict]:
    """The rows of one shape."""
    from coterie.personal.api.server import Settings, served

    backbone = Backbone(base(shape), locate(EMBEDDED) if shape == "embedded" else None)
    models = {str(i): personal(backbone, str(i), Layout()) for i in range(count)}
    together = ManyModels(models)
    vocabulary = int(backbone.config.vocab_size)
    many = requests(count, vocabulary, one=False, equal=False)
    work = {
        ALONE: batch(together, requests(count, vocabulary, one=True, equal=False), rows),
        MANY: batch(together, many, rows),
        EQUAL: batch(together, requests(count, vocabulary, one=False, equal=True), rows),
        AFTER: batch(together, many, 1),
    }
    if shape == "embedded":  # the other one has no tokenizer
        settings = Settings(0, token=TOKEN, rows=rows, queue=count)
        address = stack.enter_context(served(models, settings, print))
        work[HTTP] = over_http(address, many)
    found = ratios(in_turns(work, repeats, clock=time.process_time), ALONE)
    tokens = sum(one.most for one in many)
    return [
        {
            "shape": shape,
            "requests": name,
            "clients": 1 if name == ALONE else count,
            "rows": 1 if name == AFTER else rows,
            "tokens/s": tokens / figures["seconds"],
            "throughput": 1 / figures["ratio"],
        }
        for name, figures in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("embedded", "gpt2"), nargs="+", default=["embedded"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with ExitStack() as stack:
        shapes = [
            measured(shape, args.requests, args.rows, args.repeats, stack) for shape in args.shape
        ]
    report(list(itertools.chain(*shapes)), args.json, repeats=args.repeats)


if __name__ == "__main__":
    main()
