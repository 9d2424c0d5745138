"""The requests of OpenAI's completions and chats: supported and refused fields, and errors."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from coterie.core.foreign import json_of
from coterie.data.chats.messages import REASONING, ROLES
from coterie.personal.sampling import Sampling

SHOWN = 80  # most characters of a caller's input that an error repeats
MOST_BIASES = 300  # as OpenAI allows
DEFAULT_TOKENS = 16  # of OpenAI's completions
# fields that have no effect on an answer here
_WITHOUT_EFFECT = (
    *("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    *("service_tier", "store", "user"),
)
# unsupported fields that would change an answer, with the values that have no effect
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options"), ()),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
# the known keys of a message
_KEYS = {
    *("role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call"),
    *REASONING,
}
# empty values are accepted, since a caller may send back an answer's message unchanged
_EMPTY: tuple[Any, ...] = (None, [])
_EXPECTED = {
    "prompt": "Expected a text, a list of texts, a list of token ids, or a list of such lists.",
    "stop": "Expected a text that is not empty, or up to 4 of them.",
    "messages": f"Expected a list of messages, each with a role ({', '.join(ROLES)}) and a "
    "content (a text, or a list of parts of type text).",
}

_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Texts = Annotated[list[str], Field(min_length=1)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Lists = Annotated[list[_Ids], Field(min_length=1)]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class ApiError(Exception):
    """A refused or failed request; the message tells the caller the problem and the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def shown(given: object) -> str:
    """Return a caller's input, shortened so that an error can repeat it."""
    text = str(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class Fields(BaseModel):
    """Fields of a request, of which no unknown one is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Fields):
    """The options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is obfuscated


class _Request(Fields):
    """The fields that completions and chat completions have in common."""

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)  # as vLLM and llama.cpp have it: -1, 0 are all
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], _Bias] = Field(
        default_factory=dict, max_length=MOST_BIASES
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def top_logprobs_wanted(self) -> int | None:
        """The number of log-probabilities requested for each token; None: none at all."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        """Return the settings of the choice of tokens."""
        return Sampling(
            self.temperature,
            self.top_p,
            max(self.top_k, 0),
            self.presence_penalty,
            self.frequency_penalty,
            {int(token): bias for token, bias in self.logit_bias.items()},
            self.top_logprobs_wanted,
        )


class CompletionRequest(_Request):
    """A request to /v1/completions."""

    prompt: str | _Texts | _Ids | _Lists = ""
    max_tokens: int = Field(default=DEFAULT_TOKENS, ge=0, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)
    best_of: int | None = Field(default=None, ge=1)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list of the prompts: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return self.prompt  # type: ignore[return-value]  # one of the two that are left


class ChatRequest(_Request):
    """A request to /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)  # see `data.chats.messages`
    tools: list[dict[str, Any]] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("messages")
    @classmethod
    def _known(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Refuse unsupported keys that would change an answer, such as audio."""
        parts = (part for message in messages for part in message.items())
        if unknown := {key for key, value in parts if value not in _EMPTY} - _KEYS:
            raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
        return messages

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most(self) -> int | None:
        """The most tokens of an answer; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_R = TypeVar("_R", bound=BaseModel)


def parsed(kind: type[_R], body: bytes) -> _R:
    """Parse the body of a request. Raises ApiError."""
    try:
        body_fields = json_of(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {shown(error)}") from None
    if not isinstance(body_fields, dict):
        raise ApiError(400, "The body is not a JSON object.")
    fields = {
        name: value
        for name, value in body_fields.items()
        if value is not None and name not in _WITHOUT_EFFECT
    }
    for name, neutral in _UNSUPPORTED.items():
        if name in fields and fields.pop(name) not in neutral:
            remedy = f"Unsupported parameter: '{name}' is not supported by these models."
            raise ApiError(400, remedy, name, "unsupported_parameter")
    request = validated(kind, fields)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n):
        remedy = "'best_of' can only be equal to 'n': ask for more choices, with 'logprobs'."
        raise ApiError(400, remedy, "best_of", "unsupported_value")
    return request


def validated(kind: type[_R], fields: dict[str, Any]) -> _R:
    """Return a request with these fields. Raises ApiError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _refusal(error: ErrorDetails) -> ApiError:
    """Return the first error of a request in OpenAI's words."""
    name = shown(error["loc"][0])
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return ApiError(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if error["type"] == "missing" and len(error["loc"]) == 1:
        message = f"Missing required parameter: '{name}'."
        return ApiError(400, message, name, "missing_required_parameter")
    expected = _EXPECTED.get(name, f"{error['msg']}.")
    return ApiError(400, f"Invalid '{name}': {expected}", name, "invalid_value")
