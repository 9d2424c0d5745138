"""What many tests need: a tiny real base with its own tokenizer, a small federation on it, and
where the data sets are.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from coterie.core.threads import wait_briefly

# where two threads are asked for, as the command line does, and before PyTorch is there
wait_briefly()
# a hundred tests start a program, which would compile the whole package anew each time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)  # tests run side by side
settings.register_profile("coterie", deadline=None)  # first calls compile and import
settings.load_profile("coterie")
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither use nor fill the cache of the person who runs them."""
    os.environ["COTERIE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Files outlive a test's process, but need not outlive a machine that loses its power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the data sets, or a skip."""
    root = Path(os.environ.get("COTERIE_DATA", REPOSITORY.parent / "shared/data"))
    if not (root / "ag_news").is_dir():
        pytest.skip(f"no data sets at {root}: set COTERIE_DATA")
    return root


@pytest.fixture(scope="session")
def corpora_root() -> Path:
    """A folder with `multilingual` and `topics`, of which the repository has what the base was
    not pretrained on.
    """
    return REPOSITORY / "corpora"


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two blocks and width 16, and a byte-level tokenizer."""
    from coterie.testing import run as worlds

    return worlds.write_tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_federation():
    """Three clients with byte tokens of their own range, in windows of 8; two of them are said
    to belong together.
    """
    from coterie.testing import run as worlds

    return worlds.tiny_texts()


@pytest.fixture(scope="session")
def tiny_pictures():
    """Three clients with a few handwritten digits of 4 x 4 pixels each; to the third, labels
    mean something else than to the others.
    """
    from coterie.testing import run as worlds

    return worlds.tiny_pictures()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which experiment trackers keep what they get, and nothing leaves the machine."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.chdir(kept)
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(kept),
        "WANDB_CACHE_DIR": str(kept / "wandb-cache"),
        "WANDB_CONFIG_DIR": str(kept / "wandb-config"),
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{kept}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return kept
