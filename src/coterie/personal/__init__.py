"""A trained personal model in use."""

from coterie.personal.artifact import About, read_about, save
from coterie.personal.model import PersonalModel, clients_of, load, load_all
from coterie.personal.words import Word

__all__ = ["About", "PersonalModel", "Word", "clients_of", "load", "load_all", "read_about", "save"]
