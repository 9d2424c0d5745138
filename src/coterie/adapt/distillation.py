"""One adapter distilled from models whose predictions are mixed (Hinton et al., 2015), on the
client's own training text. Nothing is sent.

The parts know that text by heart, so what they say of it is not what they say of other text. Some
of its tokens are replaced by others of it: then they do not recognise it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.core.metrics import perplexity
from coterie.core.tensors import copy
from coterie.data.splits import Split
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture

STEPS, LOOKS = 100, 5  # looks at the validation text
LEARNING_RATE = 2e-3  # falls to a tenth by a cosine
NOISE = 0.4  # of the tokens are replaced
_TOKENS, _ROWS = 512, 16  # of a step, about; and windows that are scored at once


def distil(
    mixture: PersonalMixture, student: PersonalModel, train: Split, valid: Split
) -> tuple[float, float, float]:
    """Train a model towards the distributions that a mixture predicts, in place, and keep the step
    that is best on the validation text. Return the perplexities of that text: of the mixture, and
    of the model before and after.
    """

    def look(model: PersonalModel) -> float:
        return perplexity(torch.tensor(model.score(valid.scoring(_ROWS)), dtype=torch.float64))

    adapter = student.adapter.requires_grad_(True)
    optimiser = torch.optim.AdamW(
        adapter.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS, LEARNING_RATE / 10)
    before, random = look(student), torch.Generator().manual_seed(0)
    best, kept, rows = before, copy(adapter.state_dict()), max(_TOKENS // train.context, 1)
    for step in range(1, STEPS + 1):
        batch = train.batch((step - 1) * rows, rows)
        ids = batch if isinstance(batch, Tensor) else batch.ids
        others = ids.flatten()[torch.randint(ids.numel(), ids.shape, generator=random)]
        ids = torch.where(torch.rand(ids.shape, generator=random) < NOISE, others, ids)
        batch = ids if isinstance(batch, Tensor) else replace(batch, ids=ids)
        taught = mixture.predicted(batch)[0].exp()
        loss = cross_entropy(student.language.predicted(batch)[0].float(), taught)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        if step % (STEPS // LOOKS) == 0 and (now := look(student)) < best:
            best, kept = now, copy(adapter.state_dict())
    adapter.requires_grad_(False).load_state_dict(kept)
    return look(mixture), before, best
