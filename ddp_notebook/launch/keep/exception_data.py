"""Exceptions as data: errors of a keeper are raised in the notebook."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.errors import DDPNotebookError, HostError
from ddp_notebook.messages.keeper import KeeperFailure

_OTHERS: tuple[type[BaseException], ...] = (KeyboardInterrupt, TimeoutError, OSError)


def failure_of(error: BaseException) -> KeeperFailure:
    """Convert an exception to data."""
    number, path = None, None
    if isinstance(error, OSError) and not isinstance(error, DDPNotebookError):
        number, path = error.errno, None if error.filename is None else str(error.filename)
    words = str(error) if number is None else str(getattr(error, "strerror", ""))
    return KeeperFailure(kind=type(error).__name__, words=words, number=number, path=path)


def error_of(failure: KeeperFailure) -> BaseException:
    """Convert data to the exception; to a `HostError` if it is not of an expected class.

    Example:
        >>> from ddp_notebook.errors import StartError
        >>> error_of(failure_of(StartError("no ranks"))), error_of(failure_of(FileNotFoundError(2, "not here", "/a")))
        (StartError('no ranks'), FileNotFoundError(2, 'not here'))
        >>> error_of(failure_of(ZeroDivisionError("by 0")))
        HostError('the request to the keeper failed: ZeroDivisionError: by 0')
    """
    if failure.number is not None:
        return OSError(failure.number, failure.words, failure.path)
    for kind in (*_below(DDPNotebookError), *_OTHERS):
        if kind.__name__ == failure.kind:
            error = kind.__new__(kind)
            error.args = (failure.words,) if failure.words else ()
            return error
    return HostError(f"the request to the keeper failed: {failure.kind}: {failure.words}")


def _below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _below(one)
