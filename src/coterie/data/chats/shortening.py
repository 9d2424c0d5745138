"""Parts of a conversation: one for each answer, or without its oldest turns."""

from collections.abc import Iterator
from dataclasses import replace

from coterie.data.chats.messages import is_answer
from coterie.data.chats.reading import Conversation


def answers_apart(conversation: Conversation) -> list[Conversation]:
    """Return a conversation for each trained answer, the last message of it; none for what an
    assistant says before anybody else, which is context then.
    """
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    return [
        replace(conversation, messages=conversation.messages[: number + 1], given=number)
        for number in conversation.trained
        if number > first
    ]


def without_oldest(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation without its oldest turns, ever more of them, until one is left; a
    system's message stays.
    """
    messages = conversation.messages
    first = 1 if messages and messages[0]["role"] in ("system", "developer") else 0
    answers = [i for i, message in enumerate(messages) if is_answer(message)]
    last = max(conversation.trained or answers, default=0)
    for start in range(first + 1, last):
        if messages[start]["role"] == "user":
            kept = [*messages[:first], *messages[start:]]
            given = max(conversation.given - (start - first), 0)
            yield replace(conversation, messages=kept, given=given)
