"""Parts of a conversation: one for each answer, or without its oldest turns."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from coterie.data.chats.messages import ASSISTANT, Message, is_answer
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


def longest_that(fits: Callable[[Conversation], bool], conversation: Conversation) -> Conversation:
    """Return a conversation without its oldest turns, as few of them as are needed; a system's
    message and the last turn with a trained answer stay, even if they do not fit.

    The number of turns that are kept is doubled, then halved, so that nothing is tried that is much
    longer than what is returned.

    Args:
        fits: Whether a conversation does; if one does, so does each with fewer turns.
        conversation: One that does not.
    """
    turns = _turns(conversation)[::-1]  # the last one first

    def too_long(number: int) -> bool:
        return not fits(_from(conversation, turns[number]))

    if not turns:
        return conversation
    end = 1
    while end < len(turns) and not too_long(end):
        end *= 2
    high = min(end, len(turns))
    first = bisect_left(range(high), True, lo=end // 2 + 1, hi=high, key=too_long)
    return _from(conversation, turns[first - 1])


def without_greeting(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation without what the assistant says at its beginning, if it begins so and
    goes on.
    """
    kept = _kept(conversation.messages)
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if i >= kept and role != ASSISTANT), kept)
    if first > kept:
        yield _from(conversation, first)


def _turns(conversation: Conversation) -> list[int]:
    """Return where a conversation may begin: the first messages of its turns, but the first turn,
    up to the last trained answer.
    """
    messages = conversation.messages
    answers = [i for i, message in enumerate(messages) if is_answer(message)]
    last = max(conversation.trained or answers, default=0)
    starts = range(_kept(messages) + 1, last)
    return [start for start in starts if messages[start]["role"] == "user"]


def _kept(messages: Sequence[Message]) -> int:
    """Return how many messages stay at the beginning: a system's."""
    return int(bool(messages) and messages[0]["role"] in ("system", "developer"))


def _from(conversation: Conversation, start: int) -> Conversation:
    """Return a conversation that begins with a later message."""
    kept = _kept(conversation.messages)
    messages = [*conversation.messages[:kept], *conversation.messages[start:]]
    given = max(conversation.given - (start - kept), 0)
    return replace(conversation, messages=messages, given=given)
