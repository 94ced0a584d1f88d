"""What a data set holds, in a form that can be compared at a resume: its columns and a digest of its rows.

Looking must not touch anything: no draw from a generator, no change of the data set's own state. And it must not cost
a start more than a few seconds, nor more memory than a few rows, however large the rows are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agl_async_ckpt.agl import internals
from agl_async_ckpt.codec.content import NUM_DIGITS, STORED_FILE, NoDigestError, canonical, sample, share, stored_file

MAX_BYTES = 64 * 2**20
"""Once this much was read, the rows that are left are not."""

READ_TIMEOUT_S = 10.0
"""A data set that takes longer to hand out its sample is not compared."""

_TOO_SLOW = "reading a sample of its rows takes longer than {:g} s"
_MAX_CHUNK_ROWS = 256
_CHUNK_BYTES = 4 * 2**20
_WORKER_BATCH = 32


@dataclass(frozen=True)
class DatasetContent:
    """What is known of a data set.

    Attributes:
        columns: Of its rows, sorted; None where a row has no names for its parts.
        digest: Of the rows, with how many were read; None if they cannot be compared.
        problem: Why not.
    """

    columns: list[str] | None
    digest: str | None
    problem: str = ""


class _Chunk(NamedTuple):
    """Some rows: their columns, bytes that are equal for equal rows, and what it took to read them."""

    columns: list[str] | None
    num_rows: int
    content: bytes
    num_bytes: int
    problem: str = ""


def read_content(dataset: Any) -> DatasetContent:
    """Read columns and rows of a map-style data set.

    Rows come from where they are stored, if that is public (VERL's `RLHFDataset`, agent-lightning's `LoadedDataset`, a
    list); otherwise a loader worker, which has a copy of the data set, reads each twice, and rows that differ
    (augmentation) are not compared.
    """
    columns: list[str] | None = None
    deadline = time.monotonic() + READ_TIMEOUT_S
    content = hashlib.sha256()
    num_read = num_bytes = 0
    try:
        num_rows = len(dataset)
        for chunk in _chunks(dataset, sample(num_rows), deadline):
            columns = chunk.columns if not num_read else columns
            if chunk.problem or time.monotonic() > deadline:
                return DatasetContent(columns, None, chunk.problem or _TOO_SLOW.format(READ_TIMEOUT_S))
            content.update(chunk.content)
            num_read, num_bytes = num_read + chunk.num_rows, num_bytes + chunk.num_bytes
            if num_bytes >= MAX_BYTES:
                break
    except Exception as error:  # a comparison that cannot be made must not stop a run that can be trained
        return DatasetContent(columns, None, _problem(error))
    return DatasetContent(columns, f"{content.hexdigest()[:NUM_DIGITS]} ({share(num_read, num_rows)} rows)")


def _chunks(dataset: Any, rows: Sequence[int], deadline: float) -> Iterable[_Chunk]:
    table = internals.stored_table(dataset)
    if table is not None:
        return _stored_chunks(table, rows)
    if type(dataset) in (list, tuple):
        return (_row_chunk(dataset[row]) for row in rows)
    return _read_in_worker(dataset, rows, deadline)


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, NoDigestError) else f"{type(error).__name__}: {error}"


def _stored_chunks(table: Any, rows: Sequence[int]) -> Iterator[_Chunk]:
    """Read rows of a `datasets.Dataset` that hands out Arrow tables, few at a time where they are large.

    How many depends on what was read before and on nothing else: the same rows come in the same chunks.
    """
    columns = sorted(table.column_names)
    done = num_bytes = 0
    size = 1
    while done < len(rows):
        part = table[list(rows[done : done + size])]
        content, read = hashlib.sha256(), 0
        for text, num_hashed in _table_content(part):
            content.update(text.encode())
            read += len(text) + num_hashed
        done, num_bytes = done + len(part), num_bytes + read
        yield _Chunk(columns, len(part), content.digest(), read)
        size = max(1, min(2 * size, _MAX_CHUNK_ROWS, _CHUNK_BYTES * done // num_bytes))


def _table_content(table: Any) -> Iterator[tuple[str, int]]:
    """Write an Arrow table as texts in which equal rows are equal, whatever types of Arrow hold them.

    Column by column, nested ones taken apart: building a Python object for every row costs ten times as much. Beside
    each text, how many bytes are in it as digests alone.
    """
    for name in sorted(table.column_names):
        yield from _column_content(name, table[name].combine_chunks())


def _column_content(name: str, array: Any) -> Iterator[tuple[str, int]]:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):  # a column without rows, or of several chunks that cannot be one
        array = pa.concat_arrays(array.chunks) if array.chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_struct(kind):
        yield canonical([name, "struct", array.is_valid().to_pylist() if array.null_count else None]), 0
        parts = dict(zip((field.name for field in kind), array.flatten(), strict=True))
        if parts.keys() == STORED_FILE:
            data, paths = parts["bytes"].to_pylist(), parts["path"].to_pylist()
            pairs = zip(data, paths, strict=True)
            files = canonical([stored_file({"bytes": blob, "path": path}) for blob, path in pairs])
            yield files, sum(map(len, filter(None, data)))
            return
        for part in sorted(parts):
            yield from _column_content(f"{name}.{part}", parts[part])
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield canonical([name, "list", array.value_lengths().to_pylist()]), 0
        yield from _column_content(f"{name}[]", array.flatten())
    else:
        values = array.to_pylist()
        yield canonical([name, values]), sum(len(value) for value in values if isinstance(value, bytes))


def _row_chunk(row: Any) -> _Chunk:
    columns = sorted(map(str, row)) if isinstance(row, Mapping) else None
    try:
        content = canonical(row)
    except NoDigestError as error:
        return _Chunk(columns, 1, b"", 0, str(error))
    return _Chunk(columns, 1, hashlib.sha256(content.encode()).digest(), len(content))


class _ReadTwice:
    """Map-style view of a data set: a row's content, and why that cannot be compared."""

    def __init__(self, dataset: Any, deadline: float) -> None:
        self._dataset = dataset
        self._deadline = deadline

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> _Chunk:
        if time.monotonic() > self._deadline:  # the rows that are asked for in one go may take hours
            return _Chunk(None, 0, b"", 0, _TOO_SLOW.format(READ_TIMEOUT_S))
        try:
            chunk, again = _row_chunk(self._dataset[index]), _row_chunk(self._dataset[index])
        except Exception as error:  # in one line; the loader would send the whole traceback as its text
            return _Chunk(None, 0, b"", 0, _problem(error))
        if chunk.problem or chunk == again:
            return chunk
        return chunk._replace(problem=f"row {index} differs each time it is read")


def _read_in_worker(dataset: Any, rows: Sequence[int], deadline: float) -> Iterator[_Chunk]:
    """Have one loader worker read rows; a generator of its own keeps torch's global one where it is."""
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        _ReadTwice(dataset, deadline),  # pyright: ignore[reportArgumentType]
        batch_size=_WORKER_BATCH,
        sampler=rows,
        num_workers=1,
        collate_fn=list,
        generator=torch.Generator(),
        timeout=READ_TIMEOUT_S,
    )
    for batch in loader:
        yield from batch
