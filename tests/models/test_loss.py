"""Cross-entropy through a frozen head, against logits that are computed whole."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from coterie.models import windows
from coterie.models.windows import head_loss, head_nll

TOKENS, WIDTH, WORDS = 7, 5, 23


@pytest.fixture(params=[1, 4, 6, WORDS], ids=lambda size: f"{size} words at once")
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WORDS_AT_ONCE", request.param)
    monkeypatch.setattr(windows, "LOGITS_AT_ONCE", 1)


def drawn(
    words: int = WORDS, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias of the head, and targets: the first and last word are some."""
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(TOKENS, WIDTH), torch.randn(words, WIDTH)
    targets = torch.randint(words, (TOKENS,))
    targets[0], targets[1] = 0, words - 1
    return hidden.to(dtype), weight.to(dtype), torch.randn(words).to(dtype), targets


def naive(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """(T,) in float64."""
    bias = None if bias is None else bias.double()
    logits = linear(hidden.double(), weight.double(), bias)
    return cross_entropy(logits, targets, reduction="none")


def gradient(function: object, hidden: Tensor, *rest: Tensor | None) -> Tensor:
    hidden = hidden.detach().requires_grad_()
    found: Tensor = torch.autograd.grad(function(hidden, *rest).sum(), hidden)[0]  # type: ignore[operator]
    return found


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.usefixtures("blocks")
def test_loss_and_gradient_are_those_of_whole_logits(biased: bool) -> None:
    hidden, weight, bias, targets = drawn()
    rest = (weight, bias if biased else None, targets)
    expected = naive(hidden, *rest)
    torch.testing.assert_close(head_nll(hidden, *rest), expected)
    torch.testing.assert_close(head_loss(hidden, *rest), expected.sum())
    torch.testing.assert_close(gradient(head_loss, hidden, *rest), gradient(naive, hidden, *rest))
    assert torch.autograd.gradcheck(lambda h: head_loss(h, *rest), hidden.requires_grad_())


@pytest.mark.usefixtures("blocks")
def test_the_gradient_is_multiplied_by_what_comes_from_behind() -> None:
    hidden, weight, bias, targets = drawn()
    plain = gradient(head_loss, hidden, weight, bias, targets)
    found = gradient(lambda *of: -3 * head_loss(*of), hidden, weight, bias, targets)
    torch.testing.assert_close(found, -3 * plain)


@pytest.mark.parametrize("scale", [300.0, 1e-3])
@pytest.mark.usefixtures("blocks")
def test_logits_of_any_size_neither_overflow_nor_lose_the_gradient(scale: float) -> None:
    """Far above 88, where exp overflows in fp32, and all alike."""
    hidden, weight, bias, targets = drawn(dtype=torch.float32, scale=scale)
    expected = naive(hidden, weight, bias, targets)
    torch.testing.assert_close(
        head_nll(hidden, weight, bias, targets).double(), expected, rtol=1e-5, atol=1e-4
    )
    exact = gradient(naive, hidden, weight, bias, targets)
    found = gradient(head_loss, hidden, weight, bias, targets)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_a_target_that_is_nearly_certain_keeps_its_small_gradient() -> None:
    """1 - p is about 1e-9: as a difference of numbers of fp32 it would be 0."""
    hidden, weight = torch.tensor([[20.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    found = gradient(head_loss, hidden, weight, None, torch.tensor([0]))
    exact = gradient(naive, hidden.double(), weight, None, torch.tensor([0]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    assert found.item() != 0


@pytest.mark.usefixtures("blocks")
def test_in_bf16_the_gradient_is_as_exact_as_bf16() -> None:
    hidden, weight, bias, targets = drawn(dtype=torch.bfloat16, scale=2.0)
    exact = gradient(naive, hidden.double(), weight, bias, targets)
    found = gradient(head_loss, hidden, weight, bias, targets)
    assert found.dtype == torch.bfloat16
    assert head_nll(hidden, weight, bias, targets).dtype == torch.float32
    assert float((found.double() - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.usefixtures("blocks")
def test_a_state_that_is_not_finite_gives_a_loss_that_is_not() -> None:
    hidden, weight, bias, targets = drawn()
    hidden[2, 0] = torch.nan
    nll = head_nll(hidden, weight, bias, targets)
    assert nll.isnan().tolist() == [k == 2 for k in range(TOKENS)]
    assert head_loss(hidden, weight, bias, targets).isnan()


def test_one_word_is_certain() -> None:
    hidden, weight, bias, _ = drawn(words=1)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    assert not head_nll(hidden, weight, bias, targets).any()
    assert not gradient(head_loss, hidden, weight, bias, targets).any()


def test_no_tokens_have_no_loss() -> None:
    hidden, weight, bias, targets = (t[:0] if len(t) == TOKENS else t for t in drawn())
    assert head_loss(hidden, weight, bias, targets) == 0
    assert head_nll(hidden, weight, bias, targets).shape == (0,)


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WORDS_AT_ONCE", 4)
    monkeypatch.setattr(windows, "LOGITS_AT_ONCE", 1)
    hidden, weight, bias, targets = drawn(words=200)
    with torch.profiler.profile(record_shapes=True) as profile:
        gradient(head_loss, hidden, weight, bias, targets)
    shapes = [shape for event in profile.events() for shape in event.input_shapes if shape]
    assert [TOKENS, 4] in shapes
    assert max(size for *_, size in shapes if _ == [TOKENS]) == WIDTH
