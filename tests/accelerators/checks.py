"""On an accelerator everything comes to what it comes to on the CPU: each method, and whole runs
with their personal models.

    COTERIE_TEST_DEVICE=cuda pytest tests/accelerators/checks.py

Without the variable the device is simulated, see `simulated`: `test_accelerators` runs this file in
a process of its own.
"""

import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.cases import ALL, method_of
from torch import Tensor

import coterie
from coterie.core import devices
from coterie.core.errors import ModelError, RecipeError
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape
from coterie.runs.problems.classification import Classification
from coterie.runs.problems.language import Language, pick_dtype
from coterie.runs.problems.loading import pick_device
from coterie.runs.recipes.sections import ClassifierSection, LanguageSection
from coterie.testing.run import Run, World, tiny_pictures, tiny_texts, write_tiny_base

NAME = os.environ.get("COTERIE_TEST_DEVICE", "simulated")
if NAME == "simulated":
    import simulated

    simulated.register()
DEVICE = torch.device(NAME)
SMALL: dict[str, Any] = {"rounds": 2, "local_steps": 1}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@cache
def texts(base: Path, device: torch.device) -> World:
    """Language models on a device."""
    federation, backbone = tiny_texts(), Backbone.load(base, device=device)
    check = Language(LanguageSection(), backbone, federation).check
    trainable = Backbone.outlined(base).architecture
    return World(
        "language",
        federation,
        lambda layout: LanguageModel(backbone, layout),
        lambda layout: Adapter(trainable, layout),
        check,
    )


@cache
def pictures(device: torch.device) -> World:
    """Classifiers on a device."""
    federation, shape = tiny_pictures(), NetworkShape("mlp", (1, 4, 4), 10, (6,))
    common = CommonExpert(shape, shape.initial(3), device)
    section = ClassifierSection(kind="classifier", gate_width=5)
    found = Classification(shape, common, section, device, federation)

    def build(layout: Layout) -> Any:
        return Classifier(shape, device) if type(layout) is Layout else found.build(layout)

    def trainable(layout: Layout) -> Any:
        return Classifier(shape) if type(layout) is Layout else found.trainable(layout)

    return World("pictures", federation, build, trainable, found.check)


def test_it_is_the_accelerator_that_auto_takes() -> None:
    assert devices.accelerator() == pick_device("auto") == DEVICE.type
    wanted = "bf16" if devices.has_bf16(DEVICE) else "fp32"
    assert pick_dtype("auto", NAME) == wanted
    assert pick_dtype("auto", "cpu") == "fp32"
    with pytest.raises(RecipeError, match=f"hpu is not available here; use auto or cpu or {NAME}"):
        pick_device("hpu")
    with pytest.raises(ModelError, match="not available") as caught:
        Backbone.load("embedded", device=f"{DEVICE.type}:99")
    assert caught.value.remedy == f"Use cpu or {DEVICE.type}."


def test_a_tensor_on_the_cpu_fails(base: Path) -> None:
    """What all others rest on: it is not quietly computed with."""
    model = texts(base, DEVICE).build(Layout(rank=2))
    batch = torch.randint(257, (2, 9))
    model.score([batch])
    model.adapter.blocks[0].mlp.router.to("cpu")
    with pytest.raises(RuntimeError, match=r"on the same device|is on cpu"):
        model.score([batch])
    model.adapter.blocks[0].mlp.router.to(DEVICE)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


def test_a_seed_on_the_device_is_used_and_put_back() -> None:
    module = torch.get_device_module(DEVICE)
    before = module.get_rng_state(DEVICE)
    found = []
    for _ in range(2):
        with devices.forked(DEVICE):
            devices.seed(5, DEVICE)
            found.append((torch.rand(2), module.get_rng_state(DEVICE)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1].cpu(), found[1][1].cpu())
    assert not torch.equal(found[0][1].cpu(), before.cpu())
    assert torch.equal(module.get_rng_state(DEVICE).cpu(), before.cpu())


# Adam divides by what a gradient was so far: where that is near zero, rounding shows. On an H200
# one of Ditto's 1,472 values was 4e-5 away.
ROUNDING = 1e-4
# singular vectors turn by rounding divided by the distance of their singular values
COARSER = {"flexlora": 5e-4}


def close(found: Any, wanted: Any, atol: float) -> None:
    """Whether tensors are those of the CPU, but for rounding."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name].cpu(), value, rtol=2e-3, atol=atol)


QUICK = ("comigs-1gxs", "cobo", "ddome", "flora", "fedlease")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in ALL]
)
def test_every_method(case: str, base: Path) -> None:
    """Two rounds: the server's state, what clients remember, and scores."""
    method, done, atol = method_of(case), 0, COARSER.get(case, ROUNDING)
    for world in (partial(texts, base), pictures):
        here = world(torch.device("cpu"))
        if here.refuses(method):
            continue
        done += 1
        wanted, found = (Run(method, own).rounds(method.rounds) for own in (here, world(DEVICE)))
        close(found.server, wanted.server, atol)
        states = [dict(run.engine.states()) for run in (found, wanted)]
        for i in wanted.clients:
            close(*(dict(own.get(i, {})) for own in states), atol)
    assert done


@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_a_base_in_few_bits(bits: str, base: Path) -> None:
    """Reduced on the device, it has the values of the CPU's, and a step's gradients."""
    batch, found = torch.randint(257, (3, 9)), []
    for device in ("cpu", NAME):
        model = LanguageModel(Backbone.load(base, device=device, quantised=bits), Layout(rank=2))
        gradients, stats = model.gradient(batch, list(model.adapter.parameters()))
        found.append((stats["loss"].cpu(), [gradient.cpu() for gradient in gradients]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


def ran(recipe: str, folder: Path, model: dict[str, Any], **changes: Any) -> dict[str, float]:
    """Each client's test score of a run."""
    coterie.run(recipe, out=str(folder), model=model, compare_with=[], **changes)
    found = json.loads((folder / "result.json").read_text())
    return {client: own["test"] for client, own in found["clients"].items()}


def test_a_run_of_language_models(tmp_path: Path, base: Path) -> None:
    """Training in bf16 where `auto` takes that, else fp32; scores; what personal models say."""
    found, models = {}, {}
    for name in ("cpu", NAME):
        found[name] = ran(
            "synthetic",
            tmp_path / name,
            {"device": name, "base": str(base), "context": 16, "dtype": "fp32"},
            data={"clients": 2, "train_tokens": 600, "valid_tokens": 300, "test_tokens": 300},
            method={"name": "comigs", "specialists": 2, "router_every": 1, **SMALL},
            keep="best",
        )
        models[name] = coterie.load(tmp_path / name, "client-0", device=name)
    assert found[NAME] == pytest.approx(found["cpu"], rel=1e-3)
    here, there = models["cpu"], models[NAME]
    assert there.device.type == DEVICE.type
    batch = torch.randint(257, (3, 17))
    assert there.score([batch])[0] == pytest.approx(here.score([batch])[0], rel=1e-3)
    assert there.generate("the", max_new_tokens=4, do_sample=False) == here.generate(
        "the", max_new_tokens=4, do_sample=False
    )
    words = [[word.word for word in model.next_words("the water", 2)] for model in models.values()]
    assert words[0] == words[1]
    many = [coterie.load_many(tmp_path / name, device=name) for name in models]
    texts = [
        {client: [word.word for word in own] for client, own in one.next_words("the", 2).items()}
        for one in many
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("recipe", "client", "changes"),
    [
        ("cobo-digits", "c0-0", {"method": SMALL}),
        (
            "ddome-digits",
            None,
            {
                "method": {"rounds": 1},
                "data": {"clients": 5, "unseen": {"aligned": 1, "random": 1}},
            },
        ),
    ],
)
def test_a_run_of_classifiers(
    recipe: str, client: str | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    found, predicted = {}, {}
    for name in ("cpu", NAME):
        found[name] = ran(recipe, tmp_path / name, {"device": name}, **changes)
        client = client or min(found[name])
        model = coterie.load(tmp_path / name, client, device=name)
        predicted[name] = model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8))
    assert found[NAME] == pytest.approx(found["cpu"], rel=1e-3)
    torch.testing.assert_close(predicted[NAME].cpu(), predicted["cpu"], rtol=1e-3, atol=1e-4)
