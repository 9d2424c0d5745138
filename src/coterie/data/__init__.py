"""Texts and images as federations: clients with train, valid and test splits of their own."""

from typing import Annotated

from pydantic import Discriminator, WrapSerializer, WrapValidator

from coterie.data.corpora import AgNews, Multilingual, Topics
from coterie.data.folders import Folders
from coterie.data.hub import Hub, HubClients
from coterie.data.image_sets import Cifar10, Cifar100, Digits, Emnist, Mnist
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.own import kind_of, validated, written
from coterie.data.section import Section, Source
from coterie.data.stdlib import Stdlib
from coterie.data.synthetic import Synthetic
from coterie.data.table import Table
from coterie.data.text_sets import Clinc150, DBpedia14, YahooAnswers

Data = Annotated[
    Stdlib
    | AgNews
    | Multilingual
    | Topics
    | Folders
    | Hub
    | HubClients
    | Table
    | Synthetic
    | Digits
    | Cifar100
    | Cifar10
    | Mnist
    | Emnist
    | Clinc150
    | DBpedia14
    | YahooAnswers,
    Discriminator("kind"),
    WrapValidator(validated),
    WrapSerializer(written),
]

__all__ = [
    "AgNews",
    "Cifar10",
    "Cifar100",
    "Clinc150",
    "DBpedia14",
    "Data",
    "Digits",
    "Emnist",
    "Folders",
    "Hub",
    "HubClients",
    "Images",
    "LabelledTexts",
    "Mnist",
    "Multilingual",
    "Section",
    "Source",
    "Stdlib",
    "Synthetic",
    "Table",
    "Topics",
    "YahooAnswers",
    "kind_of",
]
