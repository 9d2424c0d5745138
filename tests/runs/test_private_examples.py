"""Privacy of single examples in whole clients and whole runs: what one example can move, and
what is refused.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from figures import as_json
from torch import Tensor

from coterie.aggregation.accountant import epsilon_of
from coterie.aggregation.dpsgd import Sanitizer, clipped_sum, rate_of, rdp_of_steps
from coterie.aggregation.noise import Source, grid
from coterie.aggregation.privacy import Privacy
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.outbound import Outbound
from coterie.client.settings import AdamW, Training
from coterie.client.site import Site
from coterie.core.callback import Callback
from coterie.core.errors import ClientError, RecipeError
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import from_bytes, to_bytes
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import TokenSplit
from coterie.engines.messages import Reply, Request, parsed
from coterie.methods import METHODS
from coterie.methods.cobo import CoBo
from coterie.methods.comigs import CoMiGS
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedsalora import FedSALoRA
from coterie.methods.section import build_method
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.runs.device.account import ACCOUNT, Account
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits, LocalPrivacy
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.run import run

pytest.importorskip("opacus")
CLIP, STEPS = 0.05, 4
PRIVACY = Privacy(unit="example", clip=CLIP, noise=1.0, delta=1e-3)
PRIVATE = "privacy={unit: example, clip: 0.5, noise: 1.0, delta: 1.0e-3}"


POSSIBLE = {
    *("fedavg", "fedprox", "ffa-lora", "fedavg-moe", "pfedmoe", "ditto"),
    *("apfl", "fedper", "lg-fedavg"),
    *("comigs", "comigs-1g1s", "comigs-2g", "comigs-2s", "comigs-1gxs", "comigs-tr"),
    *("local", "local-moe", "local-moe-tr", "pretrained"),
}


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


# What one example can move


class Released(Sanitizer):
    """Notes the clipped sums, and releases the same whatever they are: neighbours are compared
    after the same outputs.
    """

    sums: list[np.ndarray] = []  # noqa: RUF012 - emptied by every run

    def gradient(self, parts, size: int, expected: float) -> Tensor:
        """Return noise alone."""
        step = grid(self.privacy.clip, self.privacy.noise * self.privacy.clip)
        self.sums.append(
            step
            * sum((clipped_sum(part, CLIP, step) for part in parts), start=np.zeros(size, np.int64))
        )
        return torch.randn(size, generator=torch.Generator().manual_seed(len(self.sums)))


class Naive(Client):
    """Takes the gradient of what is shared where anybody would: at its own model."""

    def _initial(self, roles) -> dict[str, Tensor]:
        return {}


def client_data(windows: int = 20, valid_from: int = 0) -> ClientData:
    """Windows of 8 bytes: of two of unlike size, the smaller lacks the last ones."""

    def split(name: str, size: int, start: int = 0) -> TokenSplit:
        tokens = np.random.default_rng(7).integers(1, 60, 400).astype(np.uint16)
        return TokenSplit(name, tokens[start : start + 8 * size + 1], context=8, seed=3)

    return ClientData(
        "ann", split("train", windows), split("valid", 6, valid_from), split("test", 4)
    )


def sums_of(
    backbone: Backbone,
    data: ClientData,
    kind: type[Client] = Client,
    method: CoMiGS | Ditto | None = None,
) -> list[np.ndarray]:
    """The clipped sums of every step of a round in which all examples take part, as far as
    possible from where experts began.
    """
    method = method or CoMiGS(local_steps=STEPS, router_every=1, router_steps=2)
    training = Training(batch_size=100, experts=AdamW(lr=0.3), routers=AdamW(lr=0.3))
    model = LanguageModel(backbone, method.layout(0, Layout(rank=2)))
    client = kind("ann", model, data, training, {}, 5, 100)
    Released.sums = []
    client.sanitizer = Released(PRIVACY, frozenset({GENERALIST}), Source.seeded(0, "test"), STEPS)
    start = {
        name: 0.5 * torch.ones_like(t) for name, t in client.read(GENERALIST).items()
    }  # B is not 0, so that specialists matter
    method.local_round(
        client,
        start
        if isinstance(method, CoMiGS)
        else {GENERALIST: torch.cat([t.flatten() for t in start.values()])},
    )
    assert len(Released.sums) == STEPS
    return Released.sums


def apart(one: list[np.ndarray], other: list[np.ndarray]) -> list[float]:
    """The distance of two sums in each step."""
    return [float(np.linalg.norm(a - b)) for a, b in zip(one, other, strict=True)]


def test_one_example_moves_the_sum_by_no_more_than_the_norm_though_specialists_learn_from_it(
    backbone: Backbone,
) -> None:
    whole, without = (sums_of(backbone, client_data(windows)) for windows in (20, 19))
    assert all(0 < distance <= CLIP * (1 + 1e-4) for distance in apart(whole, without))
    naive = apart(*(sums_of(backbone, client_data(windows), Naive) for windows in (20, 19)))
    assert naive[0] <= CLIP * (1 + 1e-4)  # nothing is trained yet
    assert (
        max(naive) > 3 * CLIP
    )  # the specialists of the two differ, and with them the gradients of all other examples


def test_validation_data_which_train_routers_do_not_move_it_at_all(backbone: Backbone) -> None:
    data = [client_data(valid_from=start) for start in (0, 100)]
    assert apart(*(sums_of(backbone, own) for own in data)) == [0.0] * STEPS
    assert max(apart(*(sums_of(backbone, own, Naive) for own in data))) > CLIP


def test_a_personal_model_beside_the_shared_one_does_not_move_it(backbone: Backbone) -> None:
    found = [
        sums_of(backbone, client_data(windows), method=Ditto(local_steps=STEPS))
        for windows in (20, 19)
    ]
    assert all(0 < distance <= CLIP * (1 + 1e-4) for distance in apart(*found))


# Clients


def site(
    backbone: Backbone,
    federation: Federation,
    method: FedAvg | CoMiGS,
    privacy: Privacy = PRIVACY,
    **outbound: object,
) -> Site:
    layouts = dict.fromkeys(federation.clients, method.layout(0, Layout(rank=2)))
    leaving = Outbound(5, privacy, **outbound)  # type: ignore[arg-type]
    return Site(
        partial(LanguageModel, backbone),
        layouts,
        federation.clients,
        Training(batch_size=4),
        5,
        10,
        leaving,
    )


def answer(
    site: Site, method: object, state: dict | None = None, round: int = 0
) -> Mapping[str, Tensor]:
    sent = Client("server", site.model("ann"), site.data["ann"], site.training, {}, 5, 10).read(
        GENERALIST
    )
    return site.answer(
        method, "local_round", "ann", sent, {} if state is None else state, round, 0
    )[0]


def test_specialists_and_routers_learn_without_noise(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = CoMiGS(local_steps=1, router_every=9)
    own, private, plain = site(backbone, tiny_federation, method), {}, {}
    answer(own, method, state=private)
    client = own.client("ann", plain)  # without a sanitizer
    client.step(GENERALIST, SPECIALIST, on=client.train)
    for role in (SPECIALIST, ROUTER):
        assert torch.equal(private[f"parameters/{role}"], plain[f"parameters/{role}"])
    assert not torch.allclose(
        private["parameters/generalist"], plain["parameters/generalist"], atol=1e-4
    )
    assert private["iteration"] == plain["iteration"] == 1


def test_a_simulation_is_repeatable_and_devices_never_draw_the_same_twice(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = FedAvg(local_steps=2)
    one, again = (answer(site(backbone, tiny_federation, method), method) for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    later = answer(site(backbone, tiny_federation, method), method, round=1)
    assert any(not torch.equal(one[name], later[name]) for name in one)
    for secrets in ({"secret": True}, {"secret": True, "key": bytes(32)}):
        one, again = (
            answer(site(backbone, tiny_federation, method, **secrets), method) for _ in range(2)
        )
        assert any(not torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_micro_batches_change_nothing(
    backbone: Backbone, tiny_federation: Federation, micro_batch: int | None
) -> None:
    method = FedAvg(local_steps=3)
    whole, parts = site(backbone, tiny_federation, method), site(backbone, tiny_federation, method)
    parts.training = Training(batch_size=4, micro_batch=micro_batch)
    one, other = answer(whole, method), answer(parts, method)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-3)


def test_how_many_examples_took_part_is_not_said(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = FedAvg(local_steps=3)
    own = site(backbone, tiny_federation, method)
    sent = own.client("ann", {}).read(GENERALIST)
    _, metrics = own.answer(method, "local_round", "ann", sent, {}, 0, 0)
    assert metrics["tokens"] == 3 * 4 * 8  # what is expected


def test_a_method_that_shares_more_is_refused_by_the_client_itself(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    own = site(backbone, tiny_federation, FedAvg())
    with pytest.raises(ClientError, match="privacy of single examples does not cover"):
        answer(own, FedSALoRA())
    with pytest.raises(
        ClientError, match="midpoint_gradients: the task does not declare that its reply can be"
    ):
        own.answer(CoBo(), "midpoint_gradients", "ann", {"ben": torch.zeros(3)}, {}, 0, 0)
    with pytest.raises(ClientError, match="CoMiGS has no task 'midpoint_gradients'"):
        own.answer(CoMiGS(), "midpoint_gradients", "ann", {"ben": torch.zeros(3)}, {}, 0, 0)


@pytest.mark.parametrize(
    "name", sorted(POSSIBLE - {"pretrained", "local", "local-moe", "local-moe-tr"})
)
def test_as_many_steps_are_counted_as_are_taken(
    backbone: Backbone, tiny_federation: Federation, name: str, monkeypatch
) -> None:
    taken, whole = [], Sanitizer.gradient
    monkeypatch.setattr(
        Sanitizer, "gradient", lambda self, *args: taken.append(1) or whole(self, *args)
    )
    method = build_method({"name": name, "local_steps": 3})
    own = site(backbone, tiny_federation, method)
    sent = method.init(
        Blueprint(lambda layout: LanguageModel(backbone, layout), own.layouts, 5), ["ann"]
    )
    own.answer(
        method,
        "local_round",
        "ann",
        {n: t for n, t in sent.items() if t.is_floating_point()},
        {},
        0,
        0,
    )
    assert len(taken) == method.steps_of(50, 4) == 3


# Runs


def recipe(tiny_base: Path, *more: str) -> Recipe:
    settings = [
        f"model.base={tiny_base}",
        "compare_with=[]",
        "samples=false",
        "method.rounds=3",
        "method.local_steps=2",
    ]
    sizes = [
        "data.train_tokens=3000",
        "data.valid_tokens=700",
        "data.test_tokens=700",
        "training.batch_size=4",
    ]
    return load("quickstart", [*settings, *sizes, *more])


def test_a_run_that_was_interrupted_is_the_same_to_the_bit(tiny_base: Path, tmp_path: Path) -> None:
    class Stopping(Callback):
        def round(self, round: int) -> None:
            if round == 2:
                raise KeyboardInterrupt

    own = recipe(tiny_base, PRIVATE)
    (whole,) = as_json(run(own, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(own, tmp_path / "parts", reporter=Stopping())
    (again,) = as_json(run(own, tmp_path / "parts", resume=True))
    assert again["evaluations"] == whole["evaluations"]
    assert again["privacy"] == whole["privacy"]
    names = [
        path.relative_to(tmp_path / "whole")
        for path in sorted((tmp_path / "whole" / "clients").rglob("*.safetensors"))
    ]
    assert len(names) >= 4
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_result_says_what_each_client_spent(tiny_base: Path, tmp_path: Path) -> None:
    own = recipe(tiny_base, PRIVATE, "method.name=fedavg")
    (result,) = as_json(run(own, tmp_path / "run"))
    privacy = result["privacy"]
    windows = {i: data.train.windows for i, data in prepare(own).problem.federation.clients.items()}
    assert privacy["clients"].keys() == windows.keys()
    assert privacy["epsilon"] == max(privacy["clients"].values()) > 0
    assert "at most 6 steps" in privacy["sampling"]
    assert "single examples of a client" in privacy["covers"]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    spent = [line["epsilon"] for line in lines if line["kind"] == "privacy"]
    assert len(spent) == 3
    assert spent == sorted(spent)
    assert spent[-1] == privacy["epsilon"]


def test_who_shares_nothing_spends_nothing_and_trains_as_ever(
    tiny_base: Path, tmp_path: Path
) -> None:
    private, plain = (
        as_json(run(recipe(tiny_base, "method.name=local", *more), tmp_path / str(len(more))))[0]
        for more in ([PRIVATE], [])
    )
    assert private["privacy"]["epsilon"] == 0.0
    assert private["mean"] == plain["mean"]


def test_of_several_sizes_only_one_could_send(tiny_base: Path) -> None:
    with pytest.raises(RecipeError, match="privacy: only one of the parts may send anything"):
        prepare(recipe(tiny_base, PRIVATE, "method.name=comigs-auto"))


@pytest.mark.parametrize(
    "name",
    sorted(
        set(METHODS)
        - {"common-expert", "fedmix", "ddome", "ddome-shared"}
        - {"fedadg", "fedsr", "ensemble", "oracle", "comigs-auto"}
        - {"fedbn", "fedproto"}
    ),
)
def test_methods_that_cannot_keep_the_promise_are_refused_before_anything_starts(
    tiny_base: Path, name: str
) -> None:
    more = ["training.experts={optimiser: sgd}"] if name == "scaffold" else []
    own = recipe(
        tiny_base,
        PRIVATE,
        f"method.name={name}",
        *more,
        *(["method.rounds=0"] if name == "pretrained" else []),
    )
    if name in POSSIBLE:
        prepare(own)
        return
    with pytest.raises(RecipeError, match=r"privacy\.unit: .* possible with .*fedavg"):
        prepare(own)


def test_normalised_batches_are_refused() -> None:
    with pytest.raises(RecipeError, match="norm is group or none"):
        prepare(
            load(
                "cobo-digits",
                [
                    PRIVATE,
                    "method.name=fedavg",
                    "compare_with=[]",
                    "model.network=cnn",
                    "model.norm=batch",
                ],
            )
        )


def test_images_are_protected_one_by_one(tmp_path: Path) -> None:
    settings = [
        "method.name=fedavg",
        "compare_with=[]",
        "method.rounds=2",
        "method.local_steps=2",
        "model.network=mlp",
    ]
    (result,) = as_json(run(load("cobo-digits", [PRIVATE, *settings]), tmp_path / "run"))
    assert 0 < result["privacy"]["epsilon"] < 50


# Devices

DIGITS = [
    "compare_with=[]",
    "method.name=fedavg",
    "method.rounds=3",
    "method.local_steps=2",
    "model.network=mlp",
]


def asked(home: Path, own: Recipe, limits: Limits | None = None) -> tuple[Reply, dict[str, Tensor]]:
    """What a device answers that is asked to train, as any server could ask; of whatever method,
    it gets what fedavg would send.
    """
    fair = prepare(load("cobo-digits", [PRIVATE, *DIGITS]))
    device = Device(home, client=fair.clients[0], limits=limits or Limits())
    section = own.model_dump(mode="json")
    request = Request(
        action="task", recipe=section, run="run", client=device.client, task="local_round"
    )
    text, body = device.answer(request.model_dump_json(), to_bytes(fair.blueprint.read(GENERALIST)))
    return parsed(Reply, text), from_bytes(body) if body else {}


def test_a_device_charges_every_answer_and_stops_where_its_owner_says(tmp_path: Path) -> None:
    own = load("cobo-digits", [PRIVATE, *DIGITS])
    windows = next(iter(prepare(own).site.data.values())).train.windows
    one, two = (
        epsilon_of(0.0, rdp_of_steps(rate_of(windows, 20), 1.0, steps), 1e-5) for steps in (2, 4)
    )
    limits = Limits(unit="example", epsilon=(one + two) / 2)
    reply, _ = asked(tmp_path, own, limits=limits)
    assert not reply.problem
    assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(one)
    reply, second = asked(
        tmp_path, own, limits=limits
    )  # the same request: other noise, and so another answer
    assert "limits.epsilon" in reply.problem
    assert not second
    reply, second = asked(tmp_path / "other", own)
    reply, third = asked(tmp_path / "other", own)
    assert any(not torch.equal(second[name], third[name]) for name in second)


def test_a_device_that_wants_privacy_of_clients_is_not_content_with_that_of_examples(
    tmp_path: Path,
) -> None:
    own = load("cobo-digits", [PRIVATE, *DIGITS])
    reply, sent = asked(tmp_path, own, limits=Limits(epsilon=100.0))
    assert "with noise only" in reply.problem
    assert not sent
    reply, _ = asked(
        tmp_path, own, limits=Limits(unit="example", local_privacy=LocalPrivacy(noise_at_least=2.0))
    )
    assert "wants z of at least 2" in reply.problem


@pytest.mark.parametrize("method", ["finetuned-fedavg", "scaffold"])
def test_a_device_refuses_what_a_server_makes_of_the_same_recipe(
    tmp_path: Path, method: str
) -> None:
    privacy = load("cobo-digits", [PRIVATE, *DIGITS]).privacy
    reply, sent = asked(
        tmp_path,
        load("cobo-digits", [*DIGITS, f"method.name={method}"]).model_copy(
            update={"privacy": privacy}
        ),
    )
    assert "privacy of single examples does not cover" in reply.problem
    assert not sent
