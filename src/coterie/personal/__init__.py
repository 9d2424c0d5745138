"""Personal models in use: loading, prediction, generation, and web pages to try them."""

from coterie.models.artifact import About, Origin, read_about, save, save_classifier
from coterie.personal.classifier import PersonalClassifier, Prediction
from coterie.personal.evaluation import evaluate
from coterie.personal.loading import ManyModels, clients_of, folder_of, load, load_all, load_many
from coterie.personal.model import PersonalModel
from coterie.personal.word_search import Word

__all__ = [
    "About",
    "ManyModels",
    "Origin",
    "PersonalClassifier",
    "PersonalModel",
    "Prediction",
    "Word",
    "clients_of",
    "evaluate",
    "folder_of",
    "load",
    "load_all",
    "load_many",
    "read_about",
    "save",
    "save_classifier",
]
