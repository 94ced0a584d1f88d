"""Data sets of agent-lightning, VERL and the `datasets` library: their rows as they are stored.

Rows are read past the data set's own code: that may draw from the trainer's generators, count, or fill a cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def stored_table(dataset: Any) -> Any | None:
    """Return a `datasets.Dataset` that hands out rows as Arrow tables; None for a data set that keeps them elsewhere.

    Nothing is decoded and no transform runs: an image comes as its bytes.
    """
    datasets, rl_dataset = sys.modules.get("datasets"), sys.modules.get("verl.utils.dataset.rl_dataset")
    if rl_dataset is not None and isinstance(dataset, rl_dataset.RLHFDataset):
        frame = vars(dataset).get("dataframe")  # a subclass may keep its rows elsewhere
        dataset = frame if frame is not None and len(frame) == len(dataset) else None
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return dataset.with_format("arrow")
    return None


def index_values(dataset: Any, positions: Sequence[int]) -> list[Any] | None:
    """Return what the loader gets as `index` of some rows; None if only the data set's own code knows.

    VERL's and agent-lightning's data sets both take it from `extra_info`, and 0 where that has none.
    """
    if type(dataset) in (list, tuple):
        return [row.get("index") if isinstance(row, Mapping) else None for row in map(dataset.__getitem__, positions)]
    table = stored_table(dataset)
    if table is None or "extra_info" not in table.column_names:
        return None
    if type(dataset).__getitem__.__module__.partition(".")[0] not in ("agentlightning", "verl"):
        return None
    infos = table[list(positions)]["extra_info"].to_pylist()
    return [info.get("index", 0) if isinstance(info, Mapping) else None for info in infos]
