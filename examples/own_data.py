"""Train on data of one's own, here texts that a program makes: python examples/own_data.py (a few
seconds).
"""

from random import Random
from typing import Annotated

from pydantic import Field

import coterie
from coterie.data import Section, Source


class Weather(Section):
    """Weather reports of towns, each of which has a climate of its own. Each town is a client."""

    reports: Annotated[int, Field(ge=10, description="of each town")] = 100

    @property
    def title(self) -> str:
        return "weather reports"

    def source(self) -> Source:
        # The fingerprint says when the texts are others: until then they stay in the cache.
        return Source(fingerprint=1, read=self.read)

    def read(self) -> dict[str, list[list[str]]]:
        climates = {
            "dryton": ("sun", "heat"),
            "wetville": ("rain", "fog"),
            "coldham": ("snow", "wind"),
        }
        return {town: self.split(town, words) for town, words in climates.items()}

    def split(self, town: str, words: tuple[str, ...]) -> list[list[str]]:
        """Return the documents of a client: train, valid and test."""
        random = Random(f"{self.seed} {town}")
        days = [
            f"The report of day {day} says: more {random.choice(words)} again."
            for day in range(self.reports)
        ]
        end, rest = int(0.6 * self.reports), int(0.8 * self.reports)
        return [days[:end], days[end:rest], days[rest:]]


def main() -> None:
    recipe = coterie.Recipe(
        name="weather",
        data={"kind": "own_data:Weather", "reports": 60},
        model={"kind": "language", "base": "embedded", "context": 16},
        method={
            "name": "comigs-1g1s",
            "rounds": 2,
            "local_steps": 4,
            "router_every": 4,
            "router_steps": 1,
        },
        training={"batch_size": 4, "experts": {"lr": 1e-2}},
    )
    run = coterie.run(recipe)
    for client, result in run.result.clients.items():
        print(f"{client}: {run.result.metric} {result.test:.1f}")
    for client, words in run.load_many().next_words("The report of day 7 says: more", k=2).items():
        print(f"{client}: {', '.join(word.word for word in words)}")


if __name__ == "__main__":
    main()
