"""Conversations as data: read from files and tables, rendered by a chat template, packed."""

from coterie.data.chats.answers import Rendered
from coterie.data.chats.reading import Conversation
from coterie.data.chats.splits import ChatBatch, ChatSplit
from coterie.data.chats.template import ChatTemplate

__all__ = ["ChatBatch", "ChatSplit", "ChatTemplate", "Conversation", "Rendered"]
