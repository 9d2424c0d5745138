"""What many tests need: a tiny real base with its own tokenizer, a small federation on it, and
where the data sets are.
"""

import os
from pathlib import Path

from coterie.core.threads import wait_briefly

# where two threads are asked for, as the command line does, and before PyTorch is there
wait_briefly()

import numpy as np  # noqa: E402
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({"<|endoftext|>": 0} | {c: i for i, c in enumerate(alphabet, 1)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_federation():
    """Three clients with byte tokens of their own range, in windows of 8; two of them are said
    to belong together.
    """
    from coterie.data.federation import ClientData, Federation
    from coterie.data.splits import TokenSplit

    rng = np.random.default_rng(0)

    def split(name: str, low: int, size: int) -> TokenSplit:
        return TokenSplit(
            name, rng.integers(low, low + 60, size).astype(np.uint16), context=8, seed=low
        )

    clients = {
        name: ClientData(
            name, split("train", low, 400), split("valid", low, 120), split("test", low, 100)
        )
        for name, low in (("ann", 1), ("ben", 60), ("cleo", 120))
    }
    return Federation(
        clients, "three clients of random bytes", clusters={"ann": 0, "ben": 0, "cleo": 1}
    )


@pytest.fixture(scope="session")
def tiny_pictures():
    """Three clients with a few handwritten digits of 4 x 4 pixels each; to the third, labels
    mean something else than to the others.
    """
    from sklearn.datasets import load_digits

    from coterie.data.examples import ExampleSplit
    from coterie.data.federation import ClientData, Federation

    digits = load_digits()
    images = np.ascontiguousarray(digits.images[:, None, ::2, ::2] / 16, dtype=np.float32)

    def client(name: str, cluster: int, first: int) -> ClientData:
        labels = ((digits.target + 5 * cluster) % 10).astype(np.int64)
        bounds = {"train": (0, 20), "valid": (20, 28), "test": (28, 40)}
        splits = (
            ExampleSplit(
                split,
                images,
                labels,
                np.arange(first + start, first + end),
                first + 1,
                (0.3,),
                (0.4,),
                10,
            )
            for split, (start, end) in bounds.items()
        )
        return ClientData(name, *splits)

    clusters = {"ann": 0, "ben": 0, "cleo": 1}
    return Federation(
        {i: client(i, k, 40 * place) for place, (i, k) in enumerate(clusters.items())},
        "three clients of digits",
        clusters,
        ("ann",),
    )
