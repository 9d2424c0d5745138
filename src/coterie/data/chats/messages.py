"""The normal form of messages, the same for training and for use.

A message has a `role` and its `content` as text; an assistant's may have `reasoning_content` and
`tool_calls`, whose arguments are objects. Other accepted forms: content in parts, arguments as JSON
text, empty lists, ShareGPT's `from` and `value`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import DataError
from coterie.core.foreign import json_of

Message = dict[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
# ShareGPT's names among them
_ALIASES = {"human": "user", "observation": "tool", "function": "tool"}
_ALIASES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), ASSISTANT)
REASONING = ("reasoning_content", "reasoning", "thinking")  # names for it; the first is ours
_WEIGHTS = ("weight", "loss_weight", "loss_mask", "loss", "train", "training", "trainable")
WEIGHT = _WEIGHTS[0]  # 0 in a message that is context alone; missing in all others
_WHAT_IT_SAYS = {"content", "value", "tool_calls", "function_call", *REASONING}
_TEXT_PARTS = ("text", "input_text", "output_text")


class Mistake(DataError):
    """The error of an invalid message, or of a row without a conversation."""


def user(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def of_user(messages: Any) -> list[str]:
    """Return the texts of the messages of a chat's user. Raises Mistake."""
    return [m["content"] for m in normal_messages(messages) if m["role"] == "user"]


def is_answer(message: Message) -> bool:
    """Whether a message is an assistant's and not empty."""
    parts = (str(message.get("content") or "").strip(), message.get("tool_calls"))
    return message["role"] == ASSISTANT and any(parts)


def is_trained(message: Message) -> bool:
    """Whether a message is an answer to train on."""
    return is_answer(message) and message.get(WEIGHT) != 0


def leading(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the beginning."""
    return int(bool(messages) and messages[0]["role"] in ("system", "developer"))


def normal_messages(value: Any, name: str = "messages") -> list[Message]:
    """Return messages, given as a list or as JSON text, in normal form. Raises Mistake."""
    value = parsed(value, name)
    if not isinstance(value, Sequence) or not value:
        kind = "empty" if value in ([], ()) else f"{type(value).__name__}, not a list of messages"
        raise Mistake(f"{name} is {kind}")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(value)]


def normal_tools(value: Any) -> list[Any] | None:
    """Return tools as `{"type": "function", "function": {...}}`, given as a list or as JSON text of
    it or of each; None if there are none. Raises Mistake.
    """
    value = parsed(value, "tools")
    if not value:
        return None
    if not isinstance(value, Sequence):
        raise Mistake(f"tools is {type(value).__name__}, not a list")
    tools = [parsed(tool, f"tools[{i}]", "an object") for i, tool in enumerate(value)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise Mistake(f"tools[{i}] is {type(tool).__name__}, not the description of a tool")
    return [
        {"type": "function", "function": dict(tool)}
        if "name" in tool and "function" not in tool
        else dict(tool)
        for tool in tools
    ]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise Mistake(f"{name} is {type(value).__name__}, not a message")
    fields = {key: part for key, part in value.items() if part is not None and part != []}
    if "from" in fields and "role" not in fields:  # ShareGPT
        fields = {"role": fields.pop("from"), "content": fields.pop("value", "")} | fields
    role = fields.pop("role", None)
    role = _ALIASES.get(str(role).lower(), role)
    if role not in ROLES:
        raise Mistake(f"{name} has role {role!r}")
    if _WHAT_IT_SAYS.isdisjoint(value):
        raise Mistake(f"{name} has no content (but {', '.join(map(str, value))})")
    message: Message = {"role": role, "content": _content(fields.pop("content", ""), name)}
    message |= _reasoning(fields, name) | _calls(fields, name) | _weight(fields, name)
    for key, part in fields.items():
        check_text(part, f"{name}.{key}")
    return message | fields


def _content(value: Any, name: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise Mistake(f"{name} has content of type {type(value).__name__}, not text")
    check_text(value, name)
    return value


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind in _TEXT_PARTS and isinstance(text := part.get("text"), str):
        return text
    raise Mistake(f"{name} has a part that is not text ({kind})")


def _reasoning(fields: Message, name: str) -> Message:
    """Remove the reasoning from a message's fields; return it under its normal name."""
    texts = [fields.pop(key) for key in REASONING if isinstance(fields.get(key), str)]
    if len({text for text in texts if text}) > 1:
        raise Mistake(f"{name} has several texts of reasoning ({', '.join(REASONING)})")
    text = next(filter(None, texts), "")
    check_text(text, name)
    return {REASONING[0]: text} if text else {}


def _calls(fields: Message, name: str) -> Message:
    """Remove the tool calls from a message's fields; return them in normal form."""
    calls = parsed(fields.pop("tool_calls", []), f"{name}.tool_calls")
    if former := fields.pop("function_call", None):  # OpenAI's until 2023
        calls = [former, *calls]
    if not isinstance(calls, Sequence):
        raise Mistake(f"{name}.tool_calls is {type(calls).__name__}, not a list")
    normal = [_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {"tool_calls": normal} if normal else {}


def _call(value: Any, name: str) -> Message:
    value = parsed(value, name, "an object")
    call = {key: part for key, part in value.items() if part is not None} if value else {}
    function = call.pop("function", None)
    if function is None:  # without the wrapper
        function = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Mistake(f"{name} names no function")
    arguments = parsed(function.get("arguments") or {}, f"{name}: arguments", "an object")
    if not isinstance(arguments, Mapping):
        raise Mistake(f"{name}: arguments are {type(arguments).__name__}, not an object")
    check_text(arguments, name)
    return {"type": "function"} | call | {"function": {**function, "arguments": dict(arguments)}}


def _weight(fields: Message, name: str) -> Message:
    """Remove the weight from a message's fields; return a weight of 0 if it is not trained."""
    weights = [(key, fields.pop(key)) for key in _WEIGHTS if key in fields]
    for key, weight in weights:
        if weight not in (0, 1):
            raise Mistake(f"{name} has {key} {weight!r}; it can be 0 (context alone) or 1")
    return {WEIGHT: 0} if any(weight == 0 for _, weight in weights) else {}


def check_text(value: Any, name: str) -> None:
    """Refuse lone surrogates in any text of a value. Raises Mistake."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            check_text(part, name)
    try:
        value.encode() if isinstance(value, str) else None
    except UnicodeEncodeError:
        raise Mistake(f"{name} is not valid text (half of a surrogate pair)") from None


def parsed(value: Any, name: str, kind: str = "a list") -> Any:
    """Return a value that may be JSON text, as in tables. Raises Mistake."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        return json_of(value, finite=False)
    except ValueError as error:
        raise Mistake(f"{name} is text, not {kind} ({error})") from None
