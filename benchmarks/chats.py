"""How long it takes to make token ids of one long conversation, and of the prompt for its next
answer: linear in messages where the template adds to what was before.

    python benchmarks/chats.py [--before TREE/src] [--messages 50 500 5000] [--json FILE]

`adding` is ChatML; `rewriting` writes thoughts before the last answer alone, so that each answer
becomes a conversation of its own, of which as much as fits a window of 1,024 tokens is kept. TREE
is another checkout, such as `git worktree add TREE a36ef5f` of before; what takes it longer than
--patience seconds is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from common import RESULTS, report

SRC = Path(__file__).parent.parent / "src"
ROOM = 1024  # tokens
ADDING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "adding": ADDING,
    "rewriting": ADDING.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}",
    ),
}


def timed(kind: str, count: int) -> None:
    """Print the seconds of all of a conversation, of what fits a window, and of a prompt."""
    from transformers import AutoTokenizer

    from coterie.data.chats import ChatTemplate, Conversation

    tokenizer = AutoTokenizer.from_pretrained(SRC / "coterie" / "models" / "mini")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    template = ChatTemplate(tokenizer, TEMPLATES[kind])
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"a few words {i}"} for i in range(count)]
    conversation = Conversation("row 1", messages)
    template.way  # noqa: B018 - what is done once for a template
    fit = getattr(template, "fitted", template.encode)  # as it was called once
    works = {
        "window": lambda: fit(conversation, room=ROOM),
        "prompt": lambda: template.prompt(messages[:-1]),
    }
    seconds = {}
    for name, work in works.items():
        start = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - start
    print(json.dumps(seconds))


def seconds(tree: Path, kind: str, count: int, patience: float) -> dict[str, float]:
    """The seconds of another process; nothing where they are too many."""
    command = [sys.executable, __file__, "--timed", kind, "--messages", str(count)]
    paths = os.pathsep.join((str(tree), str(Path(__file__).parent)))
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timed", choices=TEMPLATES, help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--messages", type=int, nargs="+", default=[50, 500, 5000])
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--json", type=Path, default=RESULTS / "chats.json")
    args = parser.parse_args()
    if args.timed is not None:
        timed(args.timed, args.messages[0])
        return
    trees = {"now": SRC} | ({"before": args.before} if args.before else {})
    table = [
        {"template": kind, "messages": count, "tree": name, "window": None, "prompt": None}
        | seconds(tree, kind, count, args.patience)
        for kind, count, (name, tree) in product(TEMPLATES, args.messages, trees.items())
    ]
    report(table, args.json, room=ROOM, patience=args.patience)


if __name__ == "__main__":
    main()
