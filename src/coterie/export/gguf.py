"""Personal models for llama.cpp: one base for all clients, and for each client a small file with
its experts and its router. Stock programs run them; each request names its client.
"""

import json
import secrets
import shutil
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.errors import ExportError, Refused
from coterie.core.files import write_atomically
from coterie.data.chats import ChatBatch
from coterie.export import gguf_files
from coterie.export.check import MOST
from coterie.export.format import (
    QUESTION,
    ClientModel,
    Format,
    Options,
    Runtime,
    Serving,
    Written,
    filled_readme,
    rows_of,
)
from coterie.export.gguf_files import Tokens, check_serving
from coterie.export.mixtral import refused, relative_of
from coterie.models import gguf_base
from coterie.personal import PersonalModel

README = "README.md"
QUANTIZED = ("q8_0", "q4_0")
ORIGINAL = "original"  # the base is a GGUF file, which is taken as it is
# the most log-probabilities that are compared: the server returns each as an entry of a JSON
COMPARED = 100_000
GREEDY = {"samplers": ["top_k"], "top_k": 1}
SAMPLE = "It's 1st: 2,345 words, naïve ones too.\n\n  They're split\tas the base's tokenizer does!"


class Gguf(Format):
    """A base and LoRAs on it, for llama.cpp and the programs built on it."""

    name = "gguf"
    about = "a base and a routed LoRA for each client, for llama.cpp, of Llama, Mistral and Qwen3"
    packages = ("gguf", "xllamacpp")
    precisions = ("f16", "f32", *QUANTIZED, ORIGINAL)
    shares_base = True

    def check(self, client: ClientModel, options: Options) -> None:
        relative_of(client, self.name, gguf_files.ARCHITECTURES)
        model = client.model
        if (obstacle := next(_obstacles(model), None)) is not None:
            raise refused(client, obstacle, self.name)
        if options.precision == ORIGINAL:
            _check_original(client)
        if options.precision in QUANTIZED and (rows := gguf_files.undividable(model)):
            raise Refused(
                f"--precision {options.precision}: blocks of {gguf_files.BLOCK} weights have one "
                f"scale, and that does not divide the input width of {', '.join(rows)}",
                "Use --precision f16, or a base whose widths it divides.",
            )
        Tokens.of(model.tokenizer, model.config.vocab_size)
        check_serving(client.serving)

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        bases = {_base(client.model, options.precision): client for client in clients}
        for name, client in bases.items():
            if options.precision == ORIGINAL:
                shutil.copyfile(gguf_base.file_of(client.model.about.base), folder / name)
            else:
                gguf_files.write_base(folder / name, client, options.precision)
        write_atomically(folder / README, _readme(clients, options.precision).encode())

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        base, file = _base(client.model, options.precision), _client_file(client)
        gguf_files.write_client(folder / file, client.model, options.precision)
        return Written(folder, (file,), client.logits, shared=(base, README))

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[Runtime]:
        precise = written.shared[0].startswith("base-f32")
        base = written.folder / written.shared[0]
        most = gguf_files.context_length(client.model)
        needed = len(client.serving.prompt) + MOST
        context = max(client.model.about.context, min(needed, most))
        server = LlamaServer(base, context, client.model.tokenizer)
        with server.running([written.folder / written.files[0]], precise):
            server.window = most
            server.check_tokens(client)
            server.check_chat(client)
            server.probe = (1, max(1, min(48, COMPARED // server.vocabulary)))
            yield server

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return {
            "inputs": {"prompt": "text, or token ids", "lora": [{"id": "int", "scale": "float"}]},
            "outputs": {"content": "text", "logprobs": "of each token, where asked for"},
        }


def _base(model: PersonalModel, precision: str) -> str:
    """Return the name of the base's file for models of one layout."""
    if precision == ORIGINAL:
        return gguf_base.file_of(model.about.base).name
    n, k = model.layout.experts, model.layout.active
    experts = "" if n == 1 else f"-{n}-experts" + ("" if k == n else f"-top-{k}")
    return f"base-{precision}{experts}.gguf"


def _check_original(client: ClientModel) -> None:
    """Refuse a model that llama.cpp cannot attach to the file that its base is."""
    base, layout = client.model.about.base, client.model.layout
    if not gguf_base.names_file(base):
        problem = f"--precision {ORIGINAL}: the base {base} is no GGUF file"
        raise Refused(problem, "Use --precision f16.")
    if layout.experts > 1:
        raise Refused(
            f"{client.client} has {layout.experts} experts: llama.cpp needs a base that repeats "
            f"every MLP for each, and {base} does not",
            "Use --precision q8_0, which writes one; or train one, with method.budget: rank.",
        )
    if client.model.about.quantise is not None:
        raise Refused(
            f"{client.client} was trained on the base in {client.model.about.quantise}, which has "
            f"other values than {base}",
            "Use --precision f16.",
        )


def _client_file(client: ClientModel) -> str:
    return f"{names.encoded(client.client)}.lora.gguf"


def _obstacles(model: PersonalModel) -> Iterator[str]:
    """Yield the parts of a model that llama.cpp would compute in another way."""
    config = model.config
    if config.hidden_act != "silu":
        yield f"its MLPs have the activation {config.hidden_act}, and llama.cpp's silu"
    if unknown := gguf_files.unknown_tensors(model):
        yield f"llama.cpp has no place for the base's {unknown[0]}"
    rotary = model.backbone.model.model.rotary_emb
    kind = config.rope_parameters.get("rope_type", "default")
    scaled = gguf_files.rope_factors(model) is not None
    fixed = kind in ("default", "linear", "llama3") and rotary.attention_scaling == 1
    if not fixed or (scaled and config.model_type == "qwen3"):
        yield f"the base scales its positions by {kind}"


class LlamaServer(Runtime):
    """A server of llama.cpp in this process, with a port on this machine and a secret key, so that
    no other process can use it. `adapter` is the number of the client whose LoRA is used. It serves
    `slots` requests at a time, of `context` tokens at most.
    """

    quantity = "log-probabilities"
    most_tokens = 2048

    def __init__(self, base: Path, context: int, tokenizer: Any, slots: int = 1) -> None:
        self.base, self.context, self.slots = base, context, slots
        self.vocabulary = self.adapter = 0
        self._key = secrets.token_urlsafe(24)
        self.plain = int(tokenizer("a", add_special_tokens=False)["input_ids"][0])
        self.server: Any = None

    @contextmanager
    def running(self, adapters: Sequence[Path], precise: bool = False) -> Iterator[None]:
        """Run the server with LoRAs' files, one for a request; if `precise`, its cache is fp32."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(self.base)
        params.n_parallel = self.slots
        params.n_ctx = self.slots * (self.context + 8)
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = torch.get_num_threads()
        params.verbosity = -1
        params.api_keys = [self._key]
        params.warmup = params.ui = params.fit_params = False
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(p), 0.0) for p in adapters]
        if precise:
            flash = xllamacpp.llama_flash_attn_type
            params.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(params)
        try:
            self.vocabulary = int(self._get("/v1/models")["data"][0]["meta"]["n_vocab"])
            # a server that is stopped before its loop begins never ends
            self.complete([self.plain])
            yield
        finally:
            self.server = None  # without a reference the server stops

    def _get(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """Send a request by llama.cpp's own protocol; return the answer."""
        request = urllib.request.Request(
            f"{self.server.listening_address}{path}",
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def complete(self, prompt: Sequence[int] | str, **settings: Any) -> dict[str, Any]:
        """Complete a prompt with the LoRA of `adapter`; return the first choice."""
        request = {
            "prompt": prompt if isinstance(prompt, str) else [*prompt],
            "n_predict": 1,
            "temperature": 0.0,
            "samplers": [],
            "lora": self._lora,
        }
        answer = self.server.handle_completions(request | settings)
        if "choices" not in answer:
            raise ExportError(f"llama.cpp refuses a request: {answer}", "Report this.")
        return cast(dict[str, Any], answer["choices"][0])

    def _following(self, prompt: Sequence[int], token: int, entries: int) -> dict[str, Any] | None:
        """Return the server's entry for the token after a prompt, with the `entries` largest
        log-probabilities in descending order; None if that token has no text of its own. A bias
        makes the server choose `token`; the log-probabilities are without the bias.
        """
        bias = [[token, 1e4]]
        choice = self.complete(prompt, logprobs=entries, n_probs=entries, logit_bias=bias)
        content = (choice["logprobs"] or {}).get("content")
        return cast(dict[str, Any], content[0]) if content else None

    def _all_following(self, prompt: Sequence[int]) -> Tensor:
        """Return (V,) the log-probabilities of all tokens after a prompt."""
        answer = self._following(prompt, self.plain, self.vocabulary)
        assert answer is not None
        values = torch.full((self.vocabulary,), -torch.inf)
        entries = answer["top_logprobs"]
        ids = torch.tensor([entry["id"] for entry in entries])
        values[ids] = torch.tensor([entry["logprob"] for entry in entries])
        return values

    def logits(self, ids: Tensor) -> Tensor:
        """Return log-probabilities: (B, C) int64 -> (B, C, V), with one request for each token."""
        rows = [
            torch.stack([self._all_following(row[: end + 1]) for end in range(len(row))])
            for row in ids.tolist()
        ]
        return torch.stack(rows)

    def nll(self, rows: ChatBatch) -> float:
        total = 0.0
        for row, place in rows.counted[:, 1:].nonzero().tolist():
            *prompt, token = rows.ids[row, : place + 2].tolist()
            following = self._following(prompt, token, 1)
            if following is not None and following["id"] == token:
                total -= following["logprob"]
            else:
                # the token ends the text, or is a part of a character
                total -= float(self._all_following(prompt)[token])
        return total

    def tokens(self, text: str, begins: bool = False, written: bool = False) -> list[int]:
        """Return the ids of a text's tokens, with the token that `begins` texts; in a text that was
        `written` by a chat template control tokens count as tokens.
        """
        request = {"content": text, "add_special": begins, "parse_special": written}
        return cast(list[int], self._get("/tokenize", request)["tokens"])

    def chat_ids(self, folder: Path, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        prompt = self._get("/apply-template", {"messages": [*messages]})["prompt"]
        return self.tokens(prompt, begins=True, written=True)

    def ending(self, prompt: Sequence[int], stops: Sequence[int]) -> set[int]:
        def ends(token: int) -> bool:
            forced = self._likeliest(prompt, 2, logit_bias=[[token, 1e4]])
            return bool(forced["tokens"] == [token])

        return {token for token in stops if ends(token)}

    def answer(self, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
        completion = self._likeliest(prompt, most)
        return completion["tokens"], completion["stop_type"] == "eos"

    def _likeliest(self, prompt: Sequence[int], most: int, **settings: Any) -> dict[str, Any]:
        """Return the server's likeliest completion of a prompt, with its tokens."""
        request = {"prompt": [*prompt], "n_predict": most, "return_tokens": True, **GREEDY}
        completion: dict[str, Any] = self._get(
            "/completion", request | {"lora": self._lora} | settings
        )
        return completion

    @property
    def _lora(self) -> list[dict[str, float]]:
        return [{"id": self.adapter, "scale": 1.0}]

    def check_chat(self, client: ClientModel) -> None:
        """Check that llama.cpp answers a chat alike by OpenAI's protocol and by tokens."""
        prompt = client.serving.prompt
        if not prompt or (most := min(MOST, (self.window or MOST) - len(prompt))) < 1:
            return
        request = {"messages": [*QUESTION], "max_tokens": most, "lora": self._lora, **GREEDY}
        completion = self._get("/v1/chat/completions", request)
        answer, ended = self.answer(prompt, most)
        usage, finish = completion["usage"], completion["choices"][0]["finish_reason"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"], finish)
        if counts != (len(prompt), len(answer), "stop" if ended else "length"):
            problem = f"{client.client}: llama.cpp answers a chat in another way than its tokens"
            raise ExportError(problem, "Nothing is kept. Use --format mixtral, or report this.")

    def check_tokens(self, client: ClientModel) -> None:
        """Check that llama.cpp splits texts as the base's tokenizer does. Raises ExportError."""
        tokenizer, text = client.model.tokenizer, SAMPLE
        if client.test is not None:
            ids = rows_of(next(iter(client.test.scoring(4)))).ids
            text += tokenizer.decode(ids.flatten().tolist(), skip_special_tokens=True)
        begin = () if client.serving.prompt else client.serving.begin
        expected = [*begin, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        if (tokens := self.tokens(text, begins=not client.serving.prompt)) != expected:
            raise ExportError(
                f"{client.client}: llama.cpp splits text into {len(tokens):,} tokens, the base's "
                f"tokenizer into {len(expected):,}, or into others",
                "Nothing is kept. Use --format mixtral, and llama.cpp's own converter.",
            )


def _usage(serving: Serving) -> str:
    """Return sentences on how to prompt the models."""
    if not serving.prompt:
        return serving.usage
    return (
        "They were trained on conversations: ask them by `/v1/chat/completions`, with `messages` "
        "in place of `prompt`. The base's file holds the chat template and the tokens that end an "
        "answer. llama.cpp reads control tokens that people type as such."
    )


def _readme(clients: Sequence[ClientModel], precision: str) -> str:
    bases: dict[str, list[ClientModel]] = {}
    for client in clients:
        bases.setdefault(_base(client.model, precision), []).append(client)
    parts = []
    for base, group in bases.items():
        files = ",".join(_client_file(client) for client in group)
        ids = "\n".join(f"| {i} | {client.client} |" for i, client in enumerate(group))
        parts.append(filled_readme("gguf-base", base=base, files=files, ids=ids))
    return filled_readme("gguf", usage=_usage(clients[0].serving), parts="\n".join(parts))
