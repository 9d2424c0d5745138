"""Own folders of a programmer, a diarist and a cook: text written for the purpose."""

import random
from pathlib import Path

PEOPLE = {
    "programmer": (
        "def {f}(self, {a}):\n    {b} = self.{a}.pop()\n    if {b} is None:\n        return "
        "False\n    self.{b} = {b}\n    return {b}\n",
        "for {a} in self.{b}:\n    print({a}.{f}())\n    self.{f}({a})\n",
        "class {f}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n        self.{b} "
        "= {b}\n",
    ),
    "diarist": (
        "In the evening {f} and I walked down to the harbour. {a} had already gone home. I told "
        "{f} about {b}, and we both laughed.\n",
        "Dear diary, this morning {a} wrote to me again. I showed the letter to {f}, who thinks "
        "that {b} is behind it.\n",
        "I dreamt of {b} last night. When I woke up, {f} was making coffee, and {a} was still "
        "asleep.\n",
    ),
    "cook": (
        "Chop the {f} and fry it with {a} in a little oil. Add {b}, stir, and let it rest for "
        "ten minutes.\n",
        "For the soup take {a}, two spoons of {b} and some {f}. Boil it slowly.\n",
        "Serve the {b} with {f}. Whoever likes {a} may add some at the end.\n",
    ),
}
WORDS = {
    "programmer": (
        ("flush", "commit", "refresh", "resolve"),
        ("buffer", "cursor", "packet", "socket"),
        ("token", "header", "offset"),
    ),
    "diarist": (
        ("Ottilie", "Marigold", "Leopold"),
        ("Benedikt", "Aurelia", "Cornelius"),
        ("Rosalind", "Theodora", "Ferdinand"),
    ),
    "cook": (
        ("fennel", "cabbage", "parsnip"),
        ("saffron", "tarragon", "paprika"),
        ("vinegar", "buttermilk", "mustard"),
    ),
}


def written(root: Path, documents: int = 60) -> Path:
    """A folder for each of three people, with short documents; no word of `WORDS` is another's."""
    for person, templates in PEOPLE.items():
        rng = random.Random(person)
        (root / person).mkdir(parents=True)
        for k in range(documents):
            f, a, b = (rng.choice(words) for words in WORDS[person])
            text = "\n".join(
                template.format(f=f, a=a, b=b) for template in rng.sample(templates, len(templates))
            )
            (root / person / f"{k:02d}.txt").write_text(text)
    return root
