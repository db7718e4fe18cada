"""Load recordings from files: one that the notebook has saved, or those that ranks without a notebook have written.

Each rank writes its own file, `*.ddp`, which is a sequence of batches. `tables.saved` describes the contents of a saved
recording.
"""

from __future__ import annotations

import itertools
import os
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

from ddp_notebook.errors import MissingRecordingError, RecordingError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.tables import store
from ddp_notebook.observe.tables.saved import WrongFileError, restore
from ddp_notebook.records.codec import Batch, CodecError, decode_all

_OF_RANKS = "*.ddp"


def load(path: str | os.PathLike[str]) -> Recording:
    """Load a recording that `Recording.save` has written, or one from the directory of `DDP_NOTEBOOK_RECORD`.

    All rows of a directory are kept. The clocks of its ranks are not corrected; on one host they are the same.

    Args:
        path: a saved file, a directory with a file for each rank, or the file of one rank.

    Raises:
        RecordingError: it contains no recording, or one of another version.
        MissingRecordingError: the path does not exist. It is also a FileNotFoundError.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from ddp_notebook import Recording, load
        >>> with TemporaryDirectory() as directory:
        ...     load(Recording(world_size=4).save(f"{directory}/run.npz"))
        <Recording of 4 ranks: 0 calls, 0 spans, 0 values of metrics>
    """
    path = Path(path).expanduser()
    try:
        files = sorted(path.glob(_OF_RANKS)) if path.is_dir() else None
        opened = None if files is not None else path.open("rb")
    except FileNotFoundError:
        raise MissingRecordingError(f"the recording {path} does not exist") from None
    except (OSError, ValueError) as error:  # a null character, or half of a surrogate pair
        raise RecordingError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if opened is None:
        if not files:
            raise RecordingError(f"{path} contains no recording: no file in it matches {_OF_RANKS}")
        return _of_ranks(files)
    with opened as file:
        if not zipfile.is_zipfile(file):  # the name may be anything, because the caller of `Recording.save` selects it
            if path.suffix == Path(_OF_RANKS).suffix:
                return _of_ranks([path])
            raise RecordingError(f"{path} is not a recording: it is not a zip file as written by Recording.save()")
        try:
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return restore(arrays, Recording)
        except WrongFileError as error:
            raise RecordingError(f"{path} {error}") from None
        except Exception as error:  # zipfile and NumPy raise many kinds of errors, even tokenizer errors
            raise RecordingError(f"{path} is damaged or not a recording: {error}") from error


def _of_ranks(files: list[Path]) -> Recording:
    batches: list[list[Batch]] = []
    for file in files:
        try:
            batches.append(list(decode_all(file.read_bytes())))
        except CodecError as error:
            raise RecordingError(f"{file} is damaged or not the recording of a rank: {error}") from error
    files_of = Counter(one[0].rank for one in batches if one)
    if (most := max(files_of.values(), default=0)) > 1:
        warnings.warn(
            f"{files[0].parent} contains up to {most} files per rank, from a restarted rank or from several runs. All "
            "are read as one run; use a separate directory for each run",
            stacklevel=4,  # the caller of `ddp_notebook.load`
        )
    counts: Counter[str] = Counter()
    for batch in itertools.chain(*batches):
        counts.update({name: len(rows) for name, rows in batch.tables.items()})
    capacity = {name: max(store.CAPACITY[name], count) for name, count in counts.items()}
    recording = Recording(1 + max((batch.rank for one in batches for batch in one), default=-1), capacity=capacity)
    for row in itertools.zip_longest(*batches):  # alternating, in the order of arrival over the wire
        for batch in filter(None, row):
            recording._feed(batch)
    recording.prompts[0] = "script"  # the ranks only ran a script, outside of cells
    return recording
