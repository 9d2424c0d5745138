"""Centralized: one model on the union of all clients' data, the bound of sharing the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.data.federation import CENTRALIZED
from coterie.methods.templates import OneAdapter


@dataclass(frozen=True)
class Centralized(OneAdapter):
    """One model trained on the pooled data, with a batch N times a client's."""

    centralized: ClassVar[bool] = True

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return model.read(GENERALIST)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    personal = download  # the clients did not train: each one's model is the pooled one

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.centralized_round, {CENTRALIZED: state})
        return dict(replies[CENTRALIZED]) if replies else state

    @task(Sends.UPDATE)
    def centralized_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        self.local_iterations(client)
        return client.read(GENERALIST)
