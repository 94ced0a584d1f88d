"""What a data set holds, in a form that can be compared at a resume: its columns and a digest of its rows.

Looking must not touch anything: no draw from a generator, no change of the data set's own state.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.checkpoint.content import STORED_FILE, NoDigestError, canonical, stored_file

MAX_ROWS = 2048
"""Up to this many rows all are read, of more an even sample."""

READ_TIMEOUT_S = 30.0
"""A data set that takes longer to hand out its sample twice is not compared."""

_ROWS_PER_BATCH = 32


@dataclass(frozen=True)
class DatasetContent:
    """What is known of a data set.

    Attributes:
        columns: Keys of a row as the loader gets it, sorted.
        digest: Of the rows, with how many were read; None if they cannot be compared.
        problem: Why not.
    """

    columns: list[str]
    digest: str | None
    problem: str = ""


def read_content(dataset: Any) -> DatasetContent:
    """Read columns and rows of a map-style data set.

    Rows come from where they are stored, if that is public (VERL's `RLHFDataset`, agent-lightning's `LoadedDataset`, a
    list); otherwise a loader worker, which has a copy of the data set, reads each twice, and rows that differ
    (augmentation) are not compared.
    """
    num_rows = len(dataset)
    indices = sample(num_rows)
    content: Iterable[bytes]
    try:
        table = stored_table(dataset, indices)
        if table is not None:
            columns, content = _first_columns(dataset), table_content(table)
        elif type(dataset) in (list, tuple):
            columns, content = _first_columns(dataset), [canonical(dataset[index]) for index in indices]
        else:
            columns, content, problem = _read_in_worker(dataset, indices)
            if problem:
                return DatasetContent(columns, None, problem)
    except Exception as error:  # a comparison that cannot be made must not stop a run that can be trained
        reason = str(error) if isinstance(error, NoDigestError) else f"{type(error).__name__}: {error}"
        return DatasetContent(_first_columns(dataset), None, reason)
    share = f"all {num_rows}" if len(indices) == num_rows else f"{len(indices)} of {num_rows}"
    combined = hashlib.sha256(b"\n".join(content)).hexdigest()
    return DatasetContent(columns, f"{combined[:16]} ({share} rows)")


def sample(num_rows: int) -> list[int]:
    """Return which rows are read: all, or `MAX_ROWS` evenly spread ones with the first and the last."""
    if num_rows <= MAX_ROWS:
        return list(range(num_rows))
    return [position * (num_rows - 1) // (MAX_ROWS - 1) for position in range(MAX_ROWS)]


def stored_table(dataset: Any, indices: list[int]) -> Any | None:
    """Return rows as they are stored in Arrow, or None for a data set that only its own `__getitem__` can read.

    Nothing is decoded: an image comes as its bytes, where decoding would cost a second for every hundred.
    """
    datasets, rl_dataset = sys.modules.get("datasets"), sys.modules.get("verl.utils.dataset.rl_dataset")
    if rl_dataset is not None and isinstance(dataset, rl_dataset.RLHFDataset):
        frame = dataset.dataframe
        dataset = frame if len(frame) == len(dataset) else None
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return dataset.with_format("arrow")[indices]
    return None


def table_content(table: Any) -> Iterator[bytes]:
    """Write an Arrow table as texts in which equal rows are equal bytes, whatever types of Arrow hold them.

    Column by column, nested ones taken apart: building a Python object for every row costs ten times as much.
    """
    for name in sorted(table.column_names):
        yield from _column_content(name, table[name].combine_chunks())


def _column_content(name: str, array: Any) -> Iterator[bytes]:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):  # a column without rows, or of several chunks that cannot be one
        array = pa.concat_arrays(array.chunks) if array.chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_struct(kind):
        yield canonical([name, "struct", array.is_valid().to_pylist() if array.null_count else None])
        parts = dict(zip((field.name for field in kind), array.flatten(), strict=True))
        if parts.keys() == STORED_FILE:
            data, paths = parts["bytes"].to_pylist(), parts["path"].to_pylist()
            pairs = zip(data, paths, strict=True)
            yield canonical([stored_file({"bytes": blob, "path": path}) for blob, path in pairs])
            return
        for part in sorted(parts):
            yield from _column_content(f"{name}.{part}", parts[part])
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield canonical([name, "list", array.value_lengths().to_pylist()])
        yield from _column_content(f"{name}[]", array.flatten())
    else:
        yield canonical([name, array.to_pylist()])


def _first_columns(dataset: Any) -> list[str]:
    rng = capture.rng_state()
    try:
        return sorted(str(column) for column in dataset[0])
    finally:
        capture.set_rng_state(rng)


class _ReadTwice:
    """Map-style view of a data set: a row's columns, its content, and why that cannot be compared."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[list[str], bytes, str]:
        row = self._dataset[index]
        columns = sorted(str(column) for column in row)
        try:
            first, second = canonical(row), canonical(self._dataset[index])
        except NoDigestError as error:
            return columns, b"", str(error)
        return columns, first, "" if first == second else f"row {index} differs each time it is read"


def _read_in_worker(dataset: Any, indices: list[int]) -> tuple[list[str], list[bytes], str]:
    """Have one loader worker read rows; a generator of its own keeps torch's global one where it is.

    Returns:
        Columns of the first row, content of each, and why it cannot be compared.
    """
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        _ReadTwice(dataset),  # pyright: ignore[reportArgumentType]
        batch_size=_ROWS_PER_BATCH,
        sampler=indices,
        num_workers=1,
        collate_fn=list,
        generator=torch.Generator(),
        timeout=READ_TIMEOUT_S,
    )
    deadline = time.monotonic() + READ_TIMEOUT_S
    columns: list[str] = []
    rows: list[bytes] = []
    for batch in loader:
        for row_columns, content, problem in batch:
            columns = columns or row_columns
            if problem:
                return columns, [], problem
            rows.append(content)
        if time.monotonic() > deadline:
            return columns, [], f"reading {len(indices)} rows takes longer than {READ_TIMEOUT_S:g} s"
    return columns, rows, ""
