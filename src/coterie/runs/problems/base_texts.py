"""Clients' texts as a base takes them: no token that it lacks, no documents that it mixes."""

from dataclasses import replace

from coterie.core.errors import DataError
from coterie.data.chats import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.refusals import Refusals
from coterie.data.splits import Split, TokenSplit
from coterie.data.text_encoding import REMEDY, missing_row
from coterie.models.backbone import Backbone


def fitted_federation(federation: Federation, backbone: Backbone) -> Federation:
    """Return a federation with all clients' texts as a base takes them, see `fitted`. Raises
    DataError, with all mistakes.
    """
    everyone: dict[str, ClientData] = {}
    with Refusals() as refusals:
        for id, data in federation.everyone.items():
            with refusals.gather():
                everyone[id] = fitted(data, backbone)
    unseen = {name: {id: everyone[id] for id in group} for name, group in federation.unseen.items()}
    clients = {id: everyone[id] for id in federation.clients}
    return replace(federation, clients=clients, unseen=unseen)


def fitted(data: ClientData, backbone: Backbone) -> ClientData:
    """Return a client's texts as a base takes them: in rows of one document each where the base
    would let those of one row see each other.

    Raises:
        DataError: A token is none of the base's.
    """
    with Refusals() as refusals:
        for split in data.splits:
            with refusals.gather(f"client {data.id!r}, {split.name}: "):
                _check(backbone, split)
    packed = any(isinstance(split, ChatSplit) and split.packing for split in data.splits)
    if not packed or backbone.packs:
        return data
    return ClientData(data.id, *map(_apart, data.splits))


def _apart(split: Split) -> Split:
    return replace(split, packing=False) if isinstance(split, ChatSplit) else split


def _check(backbone: Backbone, split: Split) -> None:
    """Refuse a token that the base has no row for in its embedding. Raises DataError."""
    assert isinstance(split, TokenSplit | ChatSplit)
    largest, rows = int(split.tokens.max(initial=0)), backbone.architecture.vocabulary
    if largest >= rows:
        raise DataError(missing_row(backbone.tokenizer, largest, rows), REMEDY)
