"""Conversion of requests to prompts of tokens, within the server's limits."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core import names
from coterie.core.errors import DataError
from coterie.data.chats import jinja_process
from coterie.data.chats.messages import Mistake, of_user
from coterie.data.chats.template import TooLong
from coterie.personal.api.requests import ApiError, ChatRequest, CompletionRequest, shown
from coterie.personal.loading import ManyModels
from coterie.personal.running_batch import Continuation
from coterie.personal.text_inference import Vocabulary


@dataclass(frozen=True)
class Prepared:
    """The prompts of a request."""

    client: str  # whose model answers
    continuations: list[Continuation]  # one for each prompt
    stops: list[str]  # texts that end an answer
    echoes: list[str]  # the text of each prompt if it is part of the answer; otherwise ""
    chat: bool = False  # whether the answers are messages

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        return sum(len(one.prompt) for one in self.continuations)


class Preparation:
    """The conversion of requests to prompts, in one thread."""

    def __init__(self, models: ManyModels, context: int, texts: int, rows: int) -> None:
        self.models, self.context, self.texts, self.rows = models, context, texts, rows
        self.tokenizer = models.tokenizer
        self.vocabulary = Vocabulary(self.tokenizer)
        ends = models.backbone.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = frozenset(i for i in ends if i is not None)
        self.chats = models.chats
        self.chat_ends = self.ends | frozenset(self.chats.stops)

    def interrupt(self) -> None:
        """Stop rendering the chat template of the current request."""
        jinja_process.shared.end()

    def client(self, model: str) -> str:
        """Return the client of the model that a request names. Raises ApiError."""
        if (client := names.normal(model)) in self.models.models:
            return client
        known = shown(", ".join(self.models.models))
        remedy = f"The model '{shown(model)}' does not exist. There are: {known}"
        raise ApiError(404, remedy, "model", "model_not_found")

    def completion(self, request: CompletionRequest) -> Prepared:
        """Return the prompts of a completion request. Raises ApiError."""
        client = self.client(request.model)
        self._check(len(request.prompts), request.n)
        prompts = [self._tokens(prompt) for prompt in request.prompts]
        echoes = [
            (prompt if isinstance(prompt, str) else self.vocabulary.decode(prompt))
            if request.echo
            else ""
            for prompt in request.prompts
        ]
        for prompt in prompts:
            self._fits(len(prompt), request.max_tokens, "max_tokens")
        seed = _seed(request.seed)
        continuations = [
            Continuation(
                client,
                prompt,
                request.max_tokens,
                request.sampling(),
                (seed + place) % 2**64,
                request.n,
                self.ends,
                request.echo and request.logprobs is not None,
                text if isinstance(text, str) and request.max_tokens else "",
            )
            for place, (text, prompt) in enumerate(zip(request.prompts, prompts, strict=True))
        ]
        self._check_ids(list(request.sampling().bias), "logit_bias")
        self.models.models[client].observe(*(one.text for one in continuations if one.text))
        return Prepared(client, continuations, request.stops, echoes)

    def chat(self, request: ChatRequest) -> Prepared:
        """Return the prompt of a chat request. Raises ApiError."""
        client = self.client(request.model)
        self._check(1, request.n)
        prompt = self._template(request)
        most = self.context - len(prompt) if request.most is None else request.most
        self._fits(len(prompt), max(most, 1), "messages")
        self._check_ids(list(request.sampling().bias), "logit_bias")
        continuation = Continuation(
            client, prompt, most, request.sampling(), _seed(request.seed), request.n, self.chat_ends
        )
        self.models.models[client].observe(*of_user(request.messages))
        return Prepared(client, [continuation], request.stops, [""], chat=True)

    def _template(self, request: ChatRequest) -> list[int]:
        """Return the messages as tokens, by the base's chat template."""
        if self.chats.template is None:
            remedy = (
                "The base of these models has no chat template, so they cannot chat. Use "
                "/v1/completions, or train on a base whose tokenizer has a chat template."
            )
            raise ApiError(400, remedy, "messages", "no_chat_template")
        self._refuse_long([message.get("content") for message in request.messages], "messages")
        try:
            return self.chats.prompt(request.messages, request.tools, self.context)
        except TooLong as error:
            self._fits(error.tokens, 1, "messages")
            raise
        except Mistake as mistake:
            problem = f"Invalid 'messages': {shown(mistake.problem)}"
            raise ApiError(400, problem, "messages") from None
        except DataError as error:
            problem = shown(error.problem.removeprefix("the "))
            raise ApiError(400, f"The base's {problem}", "messages") from None

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt as tokens, texts encoded as by `generate`. Raises ApiError for tokens
        that the base lacks, and for refused control tokens in a text.
        """
        try:
            self._refuse_long([prompt], "prompt")
            ids = self.models.texts.prompt(prompt) if isinstance(prompt, str) else list(prompt)
        except DataError as error:
            raise ApiError(400, f"Invalid 'prompt': {error.problem}", "prompt") from None
        self._check_ids(ids, "prompt")
        return ids

    def _refuse_long(self, contents: Sequence[Any], param: str) -> None:
        """Refuse prompts or messages that are certainly too long, before they are tokenised."""
        characters = sum(map(_characters, contents))
        self._fits(max(len(contents), characters // self.vocabulary.longest), 0, param)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.models.backbone.architecture.vocabulary
        if max(ids, default=0) >= size:
            remedy = f"Invalid '{param}': there is no token {max(ids)}, but 0 to {size - 1}."
            raise ApiError(400, remedy, param, "invalid_value")

    def _check(self, prompts: int, choices: int) -> None:
        """Refuse more texts than the server accepts at once."""
        if choices > self.rows:
            remedy = f"Invalid 'n': this server writes at most {self.rows} at once."
            raise ApiError(400, remedy, "n")
        if prompts * choices > self.texts:
            remedy = (
                f"This server takes at most {self.texts} texts in a request, and this one asks "
                f"for {prompts * choices}. Send fewer prompts at once."
            )
            raise ApiError(400, remedy, "prompt")

    def _fits(self, prompt: int, new: int, param: str) -> None:
        if prompt + new > self.context:
            remedy = (
                f"The maximum context length here is {self.context} tokens. However, you requested "
                f"{prompt + new} tokens ({prompt} in the prompt, {new} for the completion). "
                f"Shorten the prompt, or ask for fewer tokens."
            )
            raise ApiError(400, remedy, param, "context_length_exceeded")


def _characters(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(str(part.get("text", ""))) for part in parts if isinstance(part, dict))


def _seed(given: int | None) -> int:
    return secrets.randbits(64) if given is None else given % 2**64
