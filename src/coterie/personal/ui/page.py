"""The local page of `coterie serve`: a keyboard, a chat, or what classifiers answer."""

import mimetypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from coterie.data.chats.messages import of_user
from coterie.models.text import TextShape
from coterie.personal.api.answers import ChatAnswers
from coterie.personal.api.guard import Limits, PageGuard, listening, new_token, running
from coterie.personal.api.preparation import Prepared
from coterie.personal.api.requests import ApiError, ChatRequest, Fields, validated
from coterie.personal.api.server import Api, Service, Settings, Stream
from coterie.personal.classifier import ClassifierMixture, PersonalClassifier
from coterie.personal.loading import ManyModels
from coterie.personal.model import ANSWER, PersonalModel
from coterie.personal.samples import of_image
from coterie.personal.ui import keyboard
from coterie.reports.scores import made_of

HOST = "127.0.0.1"
LARGEST = 16 << 20  # bytes of an image to classify
CLASSES = 3  # shown for each client
TEMPERATURE = 0.8  # of answers, as of `coterie generate`
# the probability of each class, the chosen expert, and the experts to choose from
Answer = tuple[dict[str, float], str, str]


class Chat(Fields):
    """A client, and the messages that it is to answer; none where a text goes on."""

    client: str
    messages: list[dict[str, Any]] = Field(default_factory=list)


class PageRequest(Fields):
    """What the page asks: next words of a text, or of an answer; or whole answers."""

    chats: list[Chat] = Field(min_length=1)
    text: str = ""
    reset: bool = False  # whether weights that follow begin again


@contextmanager
def served(
    models: Mapping[str, PersonalModel] | Mapping[str, PersonalClassifier],
    port: int,
    chat: bool = False,
    examples: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> Iterator[str]:
    """Serve the page of clients' language models, or of classifiers, on this machine only while the
    block runs, from a port (0: any free one), with texts or messages of the clients themselves to
    begin with; yield its link with the token that the page requires. `report` is called with one
    line about each internal error. Raises Refused if the port is taken, ModelError if the base has
    no tokenizer, DataError if `chat` lacks a chat template.
    """
    with listening(HOST, port) as listener:
        port = listener.getsockname()[1]
        page: Service = (
            LanguagePage(cast(Mapping[str, PersonalModel], models), chat, examples, report)
            if isinstance(next(iter(models.values())), PersonalModel)
            else ClassifierPage(cast(Mapping[str, PersonalClassifier], models), report)
        )
        guard = PageGuard(page.app(), HOST, port, new_token())
        with running(guard, listener, page.limits), closing(page):
            yield f"http://{HOST}:{port}{guard.link}"


def _assets(settings: Mapping[str, Any]) -> list[BaseRoute]:
    """Return the routes of the page's files, and of what it shows."""
    mimetypes.add_type("text/javascript", ".js")  # a registry may know another type
    static = StaticFiles(packages=[("coterie.personal.ui", "web")], html=True)
    return [Route("/page.json", lambda request: JSONResponse(settings)), Mount("/", static)]


class LanguagePage(Api):
    """A keyboard with the next words of each client and of the base, or a chat with them."""

    known = "GET /, POST /words, POST /chat"

    def __init__(
        self,
        models: Mapping[str, PersonalModel],
        chat: bool,
        examples: Sequence[str],
        report: Callable[[str], None],
    ) -> None:
        offered = keyboard.offered(ManyModels(models), chat, examples)
        people = keyboard.with_base(models)
        super().__init__(ManyModels(people), Settings(0), report)
        self._settings = keyboard.settings(people, offered, chat) | {
            "kind": "chat" if chat else "words",
            "follows": any(model.following for model in models.values()),
        }
        self._settings["clients"][-1]["chosen"] = not chat  # untrained, it answers at length

    def routes(self) -> list[BaseRoute]:
        words = Route("/words", self.words, methods=["POST"])
        return [words, Route("/chat", self.chat, methods=["POST"]), *_assets(self._settings)]

    async def words(self, request: Request) -> Response:
        """Return each client's next words, and the weights of its model's parts in words."""
        asks = await self.parsed(request, PageRequest)
        return JSONResponse(await self.worked(request, self._suggest, asks))

    def _suggest(self, asks: PageRequest) -> list[dict[str, Any]]:
        models, texts = self.preparation.models, dict[str, str]()
        for chat in asks.chats:
            client = self.preparation.client(chat.client)
            model = models.models[client]
            if asks.reset and model.following is not None:
                model.following.reset()
            messages = of_user(chat.messages) if chat.messages else ()
            model.observe(*messages, asks.text, growing=True)
            texts[client] = models.chats.opened(chat.messages, asks.text) if messages else asks.text
        words = models.next_words(texts, keyboard.SHOWN, follow=False)
        return [
            {
                "words": [asdict(word) for word in of_client],
                "shares": made_of(models.models[client].shares),
            }
            for client, of_client in words.items()
        ]

    async def chat(self, request: Request) -> Response:
        """Stream the clients' answers, each to its own chat, by their places in the request."""
        asks = await self.parsed(request, PageRequest)
        job, answers = self.begun(await self.worked(request, self._prompts, asks), ChatAnswers)
        return Stream(job, answers)

    def _prompts(self, asks: PageRequest) -> Prepared:
        """Return the prompts of all chats as those of one request, for one connection."""
        continuations = []
        for chat in asks.chats:
            fields = {"model": chat.client, "messages": chat.messages, "temperature": TEMPERATURE}
            (one,) = self.preparation.chat(validated(ChatRequest, fields)).continuations
            one.most = min(one.most, ANSWER)
            continuations.append(one)
        return Prepared("", continuations, [], [""] * len(continuations))


class ClassifierPage(Service):
    """What each client's classifier answers to an image, or to a text."""

    known = "GET /, POST /classes"

    def __init__(
        self, models: Mapping[str, PersonalClassifier], report: Callable[[str], None]
    ) -> None:
        super().__init__(Limits(body=LARGEST), report)
        self._models, self._shape = models, next(iter(models.values())).shape

    def routes(self) -> list[BaseRoute]:
        settings: dict[str, Any] = {"title": "How does each client classify it?", "kind": "text"}
        if not isinstance(self._shape, TextShape):
            settings |= {"kind": "image", "inputs": self._shape.inputs}
        return [Route("/classes", self.classes, methods=["POST"]), *_assets(settings)]

    async def classes(self, request: Request) -> Response:
        """Return the answers to the body: a text, or an image file."""
        content = await self.body(request)
        return JSONResponse(await self.worked(request, self._classify, content))

    def _classify(self, content: bytes) -> list[dict[str, Any]]:
        if isinstance(self._shape, TextShape):
            try:
                given: Any = content.decode()
            except ValueError:
                raise ApiError(400, "The text is not UTF-8.") from None
        else:
            given = of_image(content, self._shape)
        answers = {client: _answer(model, given) for client, model in self._models.items()}
        return [
            {"clients": clients, "classes": classes, "expert": expert}
            for clients, classes, expert in grouped(answers)
        ]


def _answer(model: PersonalClassifier, given: Any) -> Answer:
    """Return each class's probability, and the gate's best expert, or the parts of a mixture."""
    (batch,) = model.batches(given)
    outputs, experts = model.answer(batch.x)
    classes = dict(zip(model.about.names, outputs[0].exp().tolist(), strict=True))
    if isinstance(model, ClassifierMixture):
        return classes, made_of(dict(zip(model.parts, model.weights.tolist(), strict=True))), ""
    if experts is None:
        return classes, "", ""
    return classes, f"expert {experts.item()}", f" of {', '.join(map(str, model.experts))}"


def grouped(answers: Mapping[str, Answer]) -> list[tuple[list[str], list[tuple[str, float]], str]]:
    """Return groups of clients whose answers are equal: the clients, the most likely classes, and
    the chosen expert. Clients with the same chosen expert have the same answer, whatever other
    experts they have; the other experts are named if all clients of the group have the same.
    """
    groups: dict[Any, dict[str, Answer]] = {}
    for client, answer in answers.items():
        classes, expert, _ = answer
        seen = tuple((name, round(share, 2)) for name, share in sorted(classes.items())), expert
        groups.setdefault(seen, {})[client] = answer
    rows = []
    for group in groups.values():
        (classes, expert, among), *others = group.values()
        best = sorted(classes.items(), key=lambda item: -item[1])[:CLASSES]
        same = all(held == among for _, _, held in others)
        rows.append((list(group), best, expert + among * same))
    return rows
