"""Parts of a conversation: one for each answer, or without its oldest turns."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from coterie.data.chats.messages import ASSISTANT, is_answer, leading
from coterie.data.chats.reading import Conversation


def answers_apart(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation for each trained answer, the last message of it; none for what an
    assistant says before anybody else, which is context then.
    """
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    for number in conversation.trained:
        if number > first:
            messages = conversation.messages[: number + 1]
            yield replace(conversation, messages=messages, given=number)


def longest_that(
    fits: Callable[[Conversation], bool], conversation: Conversation, guess: int = 1
) -> tuple[Conversation, int]:
    """Return a conversation without its oldest turns, as few of them as are needed, if any, and how
    many turns are kept; a system's message and the last turn with a trained answer stay, even if
    they do not fit.

    Steps from the guess on are doubled, then halved, so that nothing is tried that is much longer
    than what is returned.

    Args:
        fits: Returns whether a conversation fits; if so, one with fewer turns fits, too.
        conversation: The conversation to shorten.
        guess: The number of turns to try first.
    """
    turns = _turns(conversation)[::-1]  # the last one first
    most, least, step = 0, len(turns) + 1, 1  # of turns that fit; of those that do not
    kept = min(guess, len(turns))
    while least - most > 1:
        if fits(_from(conversation, turns[kept - 1])):
            most, kept = kept, kept + step
        else:
            least, kept = kept, kept - step
        step *= 2
        if not most < kept < least:
            kept, step = (most + least) // 2, 1
    most = max(most, 1)
    return _from(conversation, turns[most - 1]), most


def without_greeting(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation without what the assistant says at its beginning, if it begins so and
    goes on.
    """
    kept = leading(conversation.messages)
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if i >= kept and role != ASSISTANT), kept)
    if first > kept:
        yield _from(conversation, first)


def _turns(conversation: Conversation) -> list[int]:
    """Return where a conversation may begin: the first messages of its turns, up to the last
    trained answer.
    """
    messages = conversation.messages
    answers = (i for i, message in enumerate(messages) if is_answer(message))
    last = max(conversation.trained or answers, default=0)
    first = leading(messages)
    starts = range(first + 1, last)
    return [first, *(start for start in starts if messages[start]["role"] == "user")]


def _from(conversation: Conversation, start: int) -> Conversation:
    """Return a conversation that begins with a later message."""
    kept = leading(conversation.messages)
    messages = [*conversation.messages[:kept], *conversation.messages[start:]]
    given = max(conversation.given - (start - kept), 0)
    return replace(conversation, messages=messages, given=given)
