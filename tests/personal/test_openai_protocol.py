"""`serve --api` as programs use it: OpenAI's own client against a server on this machine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
import torch
from test_many_models import LAYOUTS

import coterie
from coterie.core.errors import Refused
from coterie.data.chats import jinja_process
from coterie.models.layout import Layout
from coterie.personal.api import server
from coterie.personal.api.answers import Answer
from coterie.personal.api.server import Settings
from coterie.personal.sampling import Token

TOKEN = "a-token-of-the-tests"
GREEDY = {"temperature": 0, "max_tokens": 12}
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user begins') }}{% endif %}"
    "{{ m.role[:1] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture
def serve(make_run):
    """Starts a server with models of a family; the port is free, and nothing is left over."""
    running = []

    def start(family="llama", layouts=LAYOUTS, **settings):
        models = coterie.load_all(make_run(family, **layouts))
        problems: list[str] = []
        manager = server.served(models, Settings(0, token=TOKEN, **settings), problems.append)
        address = manager.__enter__()
        running.append((manager, problems))
        return models, address

    yield start
    for manager, problems in running:
        manager.__exit__(None, None, None)
        assert problems == []


def connect(address: str, **settings) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=address, api_key=TOKEN, **{"max_retries": 0, "timeout": 60} | settings
    )


def continued(model, prompt: str, tokens: int = 12) -> str:
    """What a model alone says behind a prompt."""
    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return model.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["llama", "few"])
def test_a_completion_is_what_the_clients_model_says(serve, family):
    models, address = serve(family)
    client = connect(address)
    for name, model in models.items():
        found = client.completions.create(model=name, prompt="cab a", **GREEDY)
        # in "few" a new line ends texts, and what ends a text is no part of it
        assert found.choices[0].text == continued(model, "cab a").removesuffix("\n")
        assert found.model == name
        assert found.object == "text_completion"
        assert found.usage.prompt_tokens == len(model.tokenizer("cab a").input_ids)
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_models_are_the_clients(serve):
    _, address = serve()
    client = connect(address)
    assert [model.id for model in client.models.list()] == list(LAYOUTS)
    assert client.models.retrieve("eve").owned_by == "coterie"
    with pytest.raises(openai.NotFoundError, match="'zoe' does not exist"):
        client.models.retrieve("zoe")


def test_names_of_any_alphabet(serve):
    _, address = serve(layouts={"Zoë & Co.": Layout(rank=2), "ben": Layout(rank=2)})
    client = connect(address)
    assert client.models.retrieve("Zoe\u0308 & Co.").id == "Zoë & Co."  # as macOS writes it
    found = client.completions.create(model="Zoe\u0308 & Co.", prompt="a", **GREEDY)
    assert found.model == "Zoë & Co."


def test_many_clients_at_once_get_what_they_get_alone(serve):
    models, address = serve(rows=4)
    client = connect(address)
    work = [
        (name, prompt, 3 + i) for i, prompt in enumerate(("a", "b c", "cab")) for name in models
    ]

    def ask(one):
        name, prompt, tokens = one
        found = client.completions.create(
            model=name, prompt=prompt, max_tokens=tokens, temperature=0
        )
        return found.choices[0].text

    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(ask, work))
    assert found == [continued(models[name], prompt, tokens) for name, prompt, tokens in work]


def test_a_stream_says_the_same_piece_by_piece(serve):
    _, address = serve("few")
    client = connect(address)
    settings = {"model": "ann", "prompt": "cab", "max_tokens": 20, "seed": 3, "n": 2}
    whole = client.completions.create(**settings)
    stream = client.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert len(parts) > 4
    for index, choice in enumerate(whole.choices):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == choice.finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert {part.id for part in parts} == {last.id}


def test_seeds_repeat_and_choices_differ(serve):
    _, address = serve()
    client = connect(address)

    def texts(**settings):
        found = client.completions.create(
            model="fay", prompt="a b", max_tokens=16, n=3, logprobs=0, **settings
        )
        return [choice.logprobs.token_logprobs for choice in found.choices]

    first, again, other = texts(seed=5), texts(seed=5), texts(seed=6)
    assert first == again != other
    assert len({tuple(one) for one in first}) == 3
    assert texts() != texts()
    assert texts(temperature=0)[0] == texts(temperature=0)[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_stops_is_no_part_of_the_answer(serve, stream):
    models, address = serve("few")
    client = connect(address)
    text = continued(models["ann"], "cab", 30).removesuffix("\n")
    assert len(text) > 6
    stop = text[4:6]

    def answer(stop):
        found = client.completions.create(
            model="ann", prompt="cab", temperature=0, max_tokens=30, stop=stop, stream=stream
        )
        parts = [part.choices[0] for part in found] if stream else found.choices
        return "".join(part.text for part in parts), parts[-1].finish_reason

    assert answer(stop) == (text[: text.index(stop)], "stop")
    assert answer(["no such text", stop]) == (text[: text.index(stop)], "stop")
    assert answer("no such text")[0] == text


def test_prompts_of_all_kinds_and_their_echo(serve):
    models, address = serve("few")
    client = connect(address)
    tokenizer = models["ann"].tokenizer
    texts = ["cab", "a b", ""]
    ids = [tokenizer(text).input_ids for text in texts[:2]]
    alone = [continued(models["ann"], text, 5).removesuffix("\n") for text in texts[:2]]
    settings = {"model": "ann", "max_tokens": 5, "temperature": 0}
    for prompt in (texts[:2], ids):
        found = client.completions.create(prompt=prompt, **settings, n=2)
        assert [c.text for c in found.choices] == [alone[0]] * 2 + [alone[1]] * 2
        assert [c.index for c in found.choices] == [0, 1, 2, 3]
        assert found.usage.prompt_tokens == sum(map(len, ids))
        found = client.completions.create(prompt=prompt, **settings, echo=True)
        assert [c.text for c in found.choices] == ["cab" + alone[0], "a b" + alone[1]]
    one = client.completions.create(prompt=ids[0], **settings)
    assert one.choices[0].text == alone[0]
    assert client.completions.create(prompt="", **settings).usage.prompt_tokens == 1


def test_log_probabilities_are_the_models(serve):
    models, address = serve("few")
    client = connect(address)
    model = models["eve"]
    found = client.completions.create(
        model="eve", prompt="cab a", max_tokens=6, logprobs=2, echo=True, temperature=0.7, seed=1
    )
    told = found.choices[0].logprobs
    text = found.choices[0].text
    assert "".join(told.tokens).replace("<|endoftext|>", "") == text
    names = [model.tokenizer.decode([i]) for i in range(12)]
    ids = torch.tensor([[names.index(token) for token in told.tokens]])
    places = model.language.forward(ids).detach()[0].log_softmax(dim=-1)
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    for k in range(1, ids.shape[1]):
        assert text[told.text_offset[k] :].startswith(told.tokens[k].replace("<|endoftext|>", ""))
        assert told.token_logprobs[k] == pytest.approx(float(places[k - 1, ids[0, k]]), abs=1e-5)
        best = {names[i]: float(v) for v, i in zip(*places[k - 1].topk(2), strict=True)}
        best[told.tokens[k]] = float(places[k - 1, ids[0, k]])
        assert told.top_logprobs[k] == pytest.approx(best, abs=1e-5)
    scored = client.completions.create(
        model="eve", prompt=text, max_tokens=0, logprobs=0, echo=True
    ).choices[0]
    assert scored.text == text
    assert scored.finish_reason == "length"


def test_letters_of_several_tokens_come_whole(serve):
    models, address = serve()
    ids = models["ann"].tokenizer("é€").input_ids
    assert len(ids) == 5  # a byte is a token here
    bias = {str(i): 100 for i in ids}
    client = connect(address)
    found = client.completions.create(
        model="ann", prompt="a", max_tokens=40, logit_bias=bias, seed=1, stream=True, logprobs=0
    )
    parts = [part.choices[0] for part in found]
    names = [name for part in parts if part.logprobs for name in part.logprobs.tokens]
    tokens = [name for name in names if name.startswith("bytes:\\x")]
    assert len(tokens) == 40
    content = b"".join(bytes.fromhex(name[-2:]) for name in tokens)
    assert "".join(part.text for part in parts) == content.decode(errors="replace")
    assert len(parts) > 5  # piece by piece


@pytest.fixture
def chatting(bases, tmp_path):
    """A folder of a base with a chat template."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "chatting"
    shutil.copytree(bases["llama"], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(chatting, bases, serve, monkeypatch):
    monkeypatch.setitem(bases, "llama", chatting)
    return serve(context=64)


MESSAGES = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}]},
]


def test_a_chat_is_a_completion_of_the_bases_template(chat):
    models, address = chat
    client = connect(address)
    settings = {"model": "ben", "messages": MESSAGES, "temperature": 0}
    found = client.chat.completions.create(**settings, max_completion_tokens=9)
    wanted = continued(models["ben"], "d: be kind\nu: hi!\na: ", 9)
    assert found.choices[0].message.content == wanted
    assert found.choices[0].message.role == "assistant"
    assert found.object == "chat.completion"
    stream = client.chat.completions.create(**settings, max_tokens=9, stream=True)
    parts = [part.choices[0] for part in stream]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == wanted
    assert parts[-1].finish_reason == "length"
    # the answer may be sent back as it came
    more = [*MESSAGES, found.choices[0].message, {"role": "user", "content": "and?"}]
    answer = client.chat.completions.create(model="ben", messages=more, max_tokens=2)
    assert answer.usage.completion_tokens == 2
    rest = client.chat.completions.create(**settings)  # as far as there is room
    assert rest.usage.total_tokens == 64


def test_log_probabilities_of_a_chat(chat):
    _, address = chat
    found = connect(address).chat.completions.create(
        model="ben", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2, n=2, seed=0
    )
    for choice in found.choices:
        assert len(choice.logprobs.content) == 3
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.logprob <= token.top_logprobs[0].logprob
            assert bytes(token.bytes)


@pytest.mark.parametrize("count", [61, 65, 20_000])
def test_many_messages_are_refused_before_others_wait_for_them(chat, count):
    _, address = chat
    client = connect(address)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(count)]
    begun = time.monotonic()
    with pytest.raises(openai.BadRequestError) as e:
        client.post(  # the client's own form of it takes ten seconds for 20,000
            "/chat/completions", body={"model": "ann", "messages": messages}, cast_to=object
        )
    assert time.monotonic() - begun < 10
    assert e.value.code == "context_length_exceeded"
    assert client.completions.create(model="ann", prompt="a", max_tokens=1).choices


ENDLESS = (
    "{% for m in messages %}{% if m.content == 'endless' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ m.role[:1] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.mark.parametrize("who", ["the caller", "the server"])
def test_a_template_that_does_not_end_ends_with_who_waits_for_it(
    chatting, bases, make_run, monkeypatch, who
):
    (chatting / "chat_template.jinja").write_text(ENDLESS)
    monkeypatch.setitem(bases, "llama", chatting)
    monkeypatch.setattr(jinja_process.shared, "seconds", 100.0)
    models = coterie.load_all(make_run("llama", **LAYOUTS))
    problems: list[str] = []
    manager = server.served(models, Settings(0, token=TOKEN), problems.append)
    address = manager.__enter__()
    ordinary = {"model": "ben", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert connect(address).chat.completions.create(**ordinary).choices
    endless = ordinary | {"messages": [{"role": "user", "content": "endless"}]}

    def ask(timeout: float) -> None:
        with suppress(openai.OpenAIError):
            connect(address, timeout=timeout).chat.completions.create(**endless)

    begun = time.monotonic()
    if who == "the caller":
        ask(0.5)
        assert connect(address).chat.completions.create(**ordinary).choices
        manager.__exit__(None, None, None)
    else:
        caller = threading.Thread(target=ask, args=(60.0,))
        caller.start()
        time.sleep(0.5)
        manager.__exit__(None, None, None)
        caller.join()
    assert time.monotonic() - begun < 40
    assert problems == []


def test_messages_that_the_template_refuses(chat):
    _, address = chat
    with pytest.raises(openai.BadRequestError, match="refuses the messages: the user begins"):
        connect(address).chat.completions.create(
            model="ben", messages=[{"role": "assistant", "content": "a"}]
        )


def test_without_a_template_there_is_no_chat(serve):
    _, address = serve()
    with pytest.raises(
        openai.BadRequestError, match="Use /v1/completions, or train on a base"
    ) as e:
        connect(address).chat.completions.create(model="ann", messages=MESSAGES)
    assert e.value.code == "no_chat_template"


def test_who_has_no_token_gets_nothing(serve):
    _, address = serve()
    for key in ("", "another-token-entirely", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
        client = openai.OpenAI(base_url=address, api_key=key or "x", max_retries=0)
        for ask in (
            client.models.list,
            lambda client=client: client.completions.create(model="ann", prompt="a"),
        ):
            with pytest.raises(openai.AuthenticationError) as e:
                ask()
            assert e.value.code == "invalid_api_key"
            assert TOKEN not in str(e.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "zoe"}, "'zoe' does not exist"),
        (
            {"max_tokens": 64},
            "The maximum context length here is 64 tokens. However, you requested",
        ),
        ({"prompt": "a" * 70}, "the prompt, 12 for the completion"),
        ({"max_tokens": -1}, "Invalid 'max_tokens'"),
        ({"max_tokens": 10**30}, "Invalid 'max_tokens'"),
        ({"max_tokens": 1.5}, "Invalid 'max_tokens'"),
        ({"max_tokens": "5"}, "Invalid 'max_tokens'"),
        ({"max_tokens": True}, "Invalid 'max_tokens'"),
        ({"temperature": -0.1}, "Invalid 'temperature'"),
        ({"temperature": 2.1}, "Invalid 'temperature'"),
        ({"top_p": 1.1}, "Invalid 'top_p'"),
        ({"n": 0}, "Invalid 'n'"),
        ({"n": 17}, "this server writes at most 16 at once"),
        ({"n": 10**6}, "Invalid 'n'"),
        ({"logprobs": 6}, "Invalid 'logprobs'"),
        ({"logprobs": -1}, "Invalid 'logprobs'"),
        ({"best_of": 3}, "'best_of' can only be equal to 'n'"),
        ({"seed": 2**63}, "Invalid 'seed'"),
        ({"presence_penalty": 3}, "Invalid 'presence_penalty'"),
        ({"logit_bias": {"a": 1}}, "Invalid 'logit_bias'"),
        ({"logit_bias": {"1": 101}}, "Invalid 'logit_bias'"),
        ({"logit_bias": {"257": 1}}, "there is no token 257, but 0 to 256"),
        ({"logit_bias": {str(i): 1 for i in range(1000)}}, "Invalid 'logit_bias'"),
        ({"stop": ["a"] * 5000}, "up to 4 of them"),
        ({"stop": ""}, "a text that is not empty"),
        ({"stop": ["a", ""]}, "a text that is not empty"),
        ({"stop": "a" * 1001}, "Invalid 'stop'"),
        ({"prompt": []}, "Expected a text, a list of texts"),
        ({"prompt": [[]]}, "Expected a text, a list of texts"),
        ({"prompt": ["a", 1]}, "Expected a text, a list of texts"),
        ({"prompt": [-1]}, "Expected a text, a list of texts"),
        ({"prompt": [257]}, "there is no token 257"),
        ({"prompt": [2**40]}, "Expected a text, a list of texts"),
        ({"prompt": ["a"] * 81}, "at most 80 texts in a request"),
        ({"stream": "yes"}, "Invalid 'stream'"),
        ({"suffix": "b"}, "'suffix' is not supported"),
        ({"extra_body": {"tools": [{}]}}, "Unknown parameter: 'tools'"),
        ({"extra_body": {"temprature": 1}}, "Unknown parameter: 'temprature'"),
        ({"extra_body": {"x" * 10**5: 1}}, "Unknown parameter: 'x{80}\\.\\.\\.'"),
    ],
)
def test_wrong_requests_are_refused_by_field(shared_address, settings, problem):
    with pytest.raises(openai.APIStatusError, match=problem) as e:
        connect(shared_address).completions.create(
            **{"model": "ann", "prompt": "a", "max_tokens": 12} | settings
        )
    assert e.value.status_code == (404 if "model" in settings else 400)
    assert e.value.type == "invalid_request_error"
    if "extra_body" not in settings:
        assert e.value.param == next(iter(settings)) or "context length" in problem + str(e.value)


@pytest.fixture(scope="module")
def shared_address(bases, tmp_path_factory):
    """One server for many requests that are refused."""
    from random_models import write_models

    folder = write_models(
        tmp_path_factory.mktemp("shared"), bases["llama"], {"ann": Layout(rank=2)}
    )
    problems: list[str] = []
    settings = Settings(0, token=TOKEN)
    with server.served(coterie.load_all(folder), settings, problems.append) as address:
        yield address
    assert problems == []


def test_what_changes_nothing_is_taken(shared_address):
    found = connect(shared_address).completions.create(
        model="ann", prompt="a", user="me", suffix="", best_of=1, extra_body={"store": True}
    )
    assert found.usage.completion_tokens <= 16  # the protocol's default


def test_a_full_queue_says_when_to_come_again(serve):
    _, address = serve("few", rows=1, queue=1)
    client = connect(address)
    long = {"model": "ann", "prompt": "cab", "max_tokens": 60, "logit_bias": {"2": -100}}
    with client.completions.create(**long, stream=True) as first:
        next(iter(first))
        with client.completions.create(**long, stream=True):
            with pytest.raises(openai.RateLimitError, match="Too many requests") as e:
                client.completions.create(model="ben", prompt="a")
            assert e.value.response.headers["retry-after"] == "1"
    # who comes again is served, since both have gone
    assert connect(address, max_retries=20).completions.create(model="ben", prompt="a").choices
    with pytest.raises(openai.BadRequestError, match="at most 2 texts"):
        client.completions.create(model="ann", prompt=["a"] * 3)


@pytest.mark.parametrize("stream", [False, True])
def test_the_work_of_who_has_gone_is_stopped(serve, stream, monkeypatch):
    stopped, removed = threading.Event(), []
    remove = server.Scheduler.cancel

    def cancel(self, continuations):
        removed.extend(one for one in continuations if one in self._work)
        remove(self, continuations)
        stopped.set()

    monkeypatch.setattr(server.Scheduler, "cancel", cancel)
    slowed(monkeypatch)
    _, address = serve("few", rows=1, queue=0)
    long = {"model": "ann", "prompt": "cab", "max_tokens": 60, "logit_bias": {"2": -100}}
    if stream:
        with connect(address).completions.create(**long, stream=True) as found:
            next(iter(found))
    else:
        with pytest.raises(openai.APITimeoutError):
            connect(address, timeout=0.3).completions.create(**long)
    assert stopped.wait(10)
    assert len(removed) == 1  # it was in work
    assert connect(address, max_retries=20).completions.create(model="ben", prompt="a").choices


def slowed(monkeypatch) -> None:
    """Let every step of a batch take a while."""
    from coterie.personal.running_batch import RunningBatch

    step = RunningBatch.step
    monkeypatch.setattr(
        RunningBatch, "step", lambda self: threading.Event().wait(0.05) or step(self)
    )


def test_a_batch_that_fails_is_told_and_the_server_goes_on(make_run, monkeypatch):
    from coterie.personal.running_batch import RunningBatch

    step = RunningBatch.step
    monkeypatch.setattr(RunningBatch, "step", lambda self: 1 / 0)
    problems: list[str] = []
    models = coterie.load_all(make_run("few", **LAYOUTS))
    with server.served(models, Settings(0, token=TOKEN), problems.append) as address:
        client = connect(address)
        with pytest.raises(openai.InternalServerError, match="The server failed to answer"):
            client.completions.create(model="ann", prompt="a")
        with pytest.raises(openai.APIError, match="The server failed to answer"):
            list(client.completions.create(model="ann", prompt="a", stream=True))
        monkeypatch.setattr(RunningBatch, "step", step)
        assert client.completions.create(model="ann", prompt="a").choices
    assert problems == ["a batch failed: ZeroDivisionError: division by zero"] * 2


def test_an_answer_that_fails_harms_no_other(make_run, monkeypatch):
    from coterie.personal.api.answers import Decoder

    add = Decoder.add
    monkeypatch.setattr(Decoder, "add", lambda self, token: add(self, token + 0 // (token - 7)))
    problems: list[str] = []
    models = coterie.load_all(make_run("few", **LAYOUTS))
    with server.served(models, Settings(0, token=TOKEN, queue=0), problems.append) as address:
        client = connect(address)
        bias = {str(token): -100 for token in (2, 7)}
        with ThreadPoolExecutor(2) as pool:
            settings = {"model": "ann", "prompt": "cab", "max_tokens": 30, "temperature": 0}
            good = pool.submit(client.completions.create, **settings, logit_bias=bias)
            for _ in range(3):
                with pytest.raises(openai.InternalServerError):
                    client.completions.create(**settings, logit_bias={"7": 100}, n=2)
            assert good.result().usage.completion_tokens == 30
    assert set(problems) == {
        "a request failed: ZeroDivisionError: integer division or modulo by zero"
    }


def test_a_server_that_stops_ends_its_streams(make_run, monkeypatch):
    slowed(monkeypatch)
    models = coterie.load_all(make_run("few", **LAYOUTS))
    manager = server.served(models, Settings(0, token=TOKEN), print)
    client = connect(manager.__enter__())
    long = {"model": "ann", "prompt": "cab", "max_tokens": 60, "logit_bias": {"2": -100}}
    stream = iter(client.completions.create(**long, stream=True))
    next(stream)
    manager.__exit__(None, None, None)
    with pytest.raises(openai.APIError):
        list(stream)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"token": "short"}, "the token is unusable"),
        ({"token": "with a space in it"}, "the token is unusable"),
        ({"token": "länger als acht"}, "the token is unusable"),
        ({"host": "no.such.host.invalid"}, "'no.such.host.invalid' is no address"),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"context": 65}, "--context 65 is longer than the base's, 64 tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused(make_run, settings, problem):
    models = coterie.load_all(make_run("llama", ann=Layout(rank=2)))
    with (
        pytest.raises(Refused, match=problem),
        server.served(models, Settings(**{"port": 0} | settings), print),
    ):
        pass


def test_a_port_that_is_taken(serve, make_run):
    models, address = serve(layouts={"ann": Layout(rank=2)})
    port = int(address.split(":")[2].partition("/")[0])
    with (
        pytest.raises(Refused, match=rf"port {port} is taken\n  Give another one"),
        server.served(models, Settings(port), print),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_what_others_can_reach_is_not_local(host, local):
    assert Settings(0, host).is_local == local


def test_probes_need_no_token_and_figures_do(serve, caplog):
    _, address = serve("llama", access_log=True)
    base = address.removesuffix("/v1")
    with caplog.at_level("INFO", logger="coterie.access"):
        assert httpx.get(f"{base}/health").json() == {"status": "ok"}
        assert httpx.get(f"{base}/metrics").status_code == 401
        assert httpx.get(f"{base}/secret-quibble").status_code == 401
        prompt = "the quibblefrost"
        connect(address).completions.create(model="ann", prompt=prompt, max_tokens=2)
        key = {"Authorization": f"Bearer {TOKEN}"}
        figures = httpx.get(f"{base}/metrics", headers=key).text
    for line in (
        'coterie_requests_total{path="/health",status="200"} 1',
        'coterie_requests_total{path="other",status="401"} 2',
        'coterie_requests_total{path="/v1/completions",status="200"} 1',
        "coterie_texts 0",
    ):
        assert line in figures.splitlines()
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("POST /v1/completions 200 0.") for line in lines)
    assert "quibble" not in "".join(lines)


def test_the_most_likely_tokens_are_sampled_alone(serve):
    _, address = serve("llama")
    client = connect(address)
    settings = {"model": "ann", "prompt": "the", "max_tokens": 12}
    greedy = client.completions.create(**settings, temperature=0).choices[0].text
    for seed in range(3):
        given = client.completions.create(
            **settings, temperature=2, seed=seed, extra_body={"top_k": 1}
        )
        assert given.choices[0].text == greedy


@pytest.mark.parametrize("stops", [[], [" c"]])
def test_a_message_begins_without_white_space_however_it_is_cut(stops):
    class Letters:
        def decode(self, ids, special=True):
            return "".join(chr(i) for i in ids)

    whole = "  \n a b c d"
    for chat, expected in ((True, whole.lstrip()), (False, whole)):
        answer, text = Answer(Letters(), stops, 0, chat), ""
        for place, letter in enumerate(whole):
            piece = answer.add(Token(ord(letter)), "length" if place == len(whole) - 1 else None)
            text += piece.text
            if piece.finish:
                break
        assert text == (expected.partition(stops[0])[0] if stops else expected)
