"""Dispatch table of a message receiver: maps message types to handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_R = TypeVar("_R")


class UnknownMessageError(ValueError):
    """The receiver has no handler for this message type."""


class Table(Generic[_R]):
    """Calls the handler for the type of a message.

    Args:
        handlers: handler for each message type. A handler gets the arguments of `handle`; the message is the last one.

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
        """Call the handler of a message, which is the last argument. Return the handler's result.

        Raises:
            UnknownMessageError: no handler for the message type.
        """
        *_, message = arguments
        handler = self._handlers.get(type(message))
        if handler is None:
            raise UnknownMessageError(f"nothing here handles {type(message).__name__}")
        return handler(*arguments)
