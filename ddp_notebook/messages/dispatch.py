"""From a kind of messages to the function that handles it: the one table of whatever receives messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ddp_notebook.messages.encoding import Message

_R = TypeVar("_R")


class UnknownMessageError(ValueError):
    """A message came that the receiver has no handler for."""


class Table(Generic[_R]):
    """Calls the handler of a message's kind.

    Args:
        handlers: by the kind of a message; each gets the message after the arguments that are given to `handle`.

    Example:
        >>> from ddp_notebook.messages.hosts import FactsRequest, PingRequest
        >>> table = Table({PingRequest: lambda message: "pong"})
        >>> table.handle(PingRequest())
        'pong'
        >>> table.handle(FactsRequest())
        Traceback (most recent call last):
        ddp_notebook.messages.dispatch.UnknownMessageError: nothing here handles FactsRequest
    """

    def __init__(self, handlers: Mapping[type[Message], Callable[..., _R]]) -> None:
        self._handlers = dict(handlers)

    def __contains__(self, kind: type[Message]) -> bool:
        return kind in self._handlers

    def __iter__(self) -> Iterator[type[Message]]:
        return iter(self._handlers)

    def handle(self, *arguments: Any) -> _R:
        """Handle a message, which is the last argument.

        Raises:
            UnknownMessageError: there is no handler for its kind.
        """
        *_, message = arguments
        handler = self._handlers.get(type(message))
        if handler is None:
            raise UnknownMessageError(f"nothing here handles {type(message).__name__}")
        return handler(*arguments)
