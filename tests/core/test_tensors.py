"""Named tensors: sums, codec, and files that are whole or not there."""

import errno
import hashlib
import resource
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import files, tensors
from coterie.core.errors import CheckpointError, SaveError, TensorError

SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text("abc./_0", min_size=1, max_size=8), st.tuples(SHAPES, DTYPES), max_size=4
    )
)
def test_bytes_and_back(forms: dict[str, tuple[list[int], torch.dtype]]) -> None:
    named = {name: torch.rand(shape).mul(100).to(dtype) for name, (shape, dtype) in forms.items()}
    found = tensors.from_bytes(tensors.to_bytes(named))
    assert found.keys() == named.keys()
    assert all(torch.equal(found[n], named[n]) and found[n].dtype == named[n].dtype for n in named)


def test_a_file_holds_the_bytes_of_a_message(tmp_path: Path) -> None:
    path, x = tmp_path / "x.safetensors", torch.arange(12.0).view(3, 4)
    named = {
        "rows": x[1:],
        "row": x[0],
        "columns": x.T,
        "none": torch.zeros(0, 3),
        "step": torch.tensor(7),
        "b": x.bfloat16(),
    }
    files.save(path, named, {"k": "v"})
    assert path.read_bytes() == tensors.to_bytes(named, {"k": "v"})
    assert files.digest_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tensors.nbytes(named) == 32 + 16 + 48 + 8 + 24


@settings(max_examples=50)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_damaged_bytes_are_refused_never_crash(noise: bytes, cut: int) -> None:
    good = tensors.to_bytes({"a": torch.arange(20.0)})
    for bad in (noise, good[:cut][: len(good) - 1]):
        with pytest.raises(TensorError, match="not valid safetensors"):
            tensors.from_bytes(bad)


@settings(max_examples=30)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5), st.integers(0, 2**31))
def test_weighted_sum_is_the_sum(weights: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    named = [
        {"a": torch.randn(3, 2, generator=generator), "b": torch.randn((), generator=generator)}
        for _ in weights
    ]
    found = tensors.weighted_sum(zip(weights, named, strict=True))
    for name in ("a", "b"):
        expected = torch.stack(
            [w * x[name].double() for w, x in zip(weights, named, strict=True)]
        ).sum(0)
        torch.testing.assert_close(found[name].double(), expected, atol=1e-5, rtol=1e-5)


def test_sums_leave_their_terms_alone() -> None:
    x, y = {"a": torch.ones(2)}, {"a": torch.ones(2)}
    assert torch.equal(tensors.axpy(3.0, x, y)["a"], torch.full((2,), 4.0))
    assert torch.equal(x["a"], torch.ones(2))
    assert torch.equal(y["a"], torch.ones(2))
    assert tensors.weighted_sum([]) == {}


def test_dot_and_norm() -> None:
    x = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert tensors.dot(x, x) == 25
    assert tensors.norm(x) == 5


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": torch.zeros(2), "x": torch.zeros(1)}, "unexpected tensor 'x'"),
        ({}, "'a' is missing"),
        ({"a": torch.zeros(3)}, r"'a' is float32\[3\], expected float32\[2\]"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, r"'a' is float64\[2\]"),
    ],
)
def test_unlike_tensors_are_named(found: tensors.Tensors, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        tensors.check_alike({"a": torch.zeros(2)}, found)


def test_not_finite_is_seen() -> None:
    assert tensors.all_finite({"a": torch.ones(2), "n": torch.tensor([1])})
    assert not tensors.all_finite({"a": torch.tensor([1.0, torch.nan])})
    assert not tensors.all_finite({"a": torch.tensor([torch.inf])})


def test_a_truncated_file_is_refused_and_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    files.save(path, {"a": torch.ones(10)}, {"k": "v"})
    assert files.load(path)[1] == {"k": "v"}
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        files.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        files.load(tmp_path / "none.safetensors")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    files.save(path, {"a": torch.ones(1)})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SaveError, match=r"(?s)No space left.*unchanged.*Free some space"):
        files.save(path, {"a": torch.zeros(1)})
    monkeypatch.undo()
    assert torch.equal(files.load(path)[0]["a"], torch.ones(1))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_that_cannot_grow_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    files.save(path, {"a": torch.ones(1)})
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(
            SaveError, match=r"(?s)cannot write .*File too large.*unchanged.*Free some space"
        ):
            files.save(path, {"a": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(files.load(path)[0]["a"], torch.ones(1))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    "names", [("a", "b"), ("a longer name", "b"), ("a name of yet another length", "b")]
)
def test_what_is_read_begins_where_tensors_begin(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Elsewhere products are rounded in another way, and a run that goes over files or messages
    would end otherwise than one in memory.
    """
    named = {name: torch.randn(5) for name in names}
    files.save(tmp_path / "file", named)
    for found in (files.load(tmp_path / "file")[0], tensors.from_bytes(tensors.to_bytes(named))):
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())
