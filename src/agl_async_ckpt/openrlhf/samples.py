"""OpenRLHF's `Experience` objects <-> the columns of a batch, so that a checkpoint holds plain values, no pickles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from agl_async_ckpt.exceptions import StateMismatchError, UnencodableValueError
from agl_async_ckpt.openrlhf.internals import experience_class
from agl_async_ckpt.state import Batch, num_rows

INFO = "info"
_INFO_PREFIX = "info."


def to_columns(samples: Sequence[Any]) -> Batch:
    """Turn samples into columns: field name -> tensor or list, (num_samples,) each.

    Values of one type and shape are stacked: a tensor is a record of its own in the file, dear for a single number.

    Raises:
        UnencodableValueError: A sample is no plain `Experience`.
    """
    experience = experience_class()
    names = [field.name for field in fields(experience)]
    for index, sample in enumerate(samples):
        if type(sample) is not experience or set(vars(sample)) != set(names):
            extra = sorted(set(vars(sample)) - set(names))
            raise UnencodableValueError(
                f"generated sample {index}: {type(sample).__qualname__} {f'with {extra} ' if extra else ''}"
                "cannot be saved exactly."
            )
    columns: dict[str, Any] = {}
    for name in names:
        values = [getattr(sample, name) for sample in samples]
        if name == INFO and _have_same_keys(values):
            columns |= {_INFO_PREFIX + key: _stacked([value[key] for value in values]) for key in values[0]}
        else:
            columns[name] = _stacked(values)
    return columns


def from_columns(columns: Batch | None) -> list[Any]:
    """Rebuild the samples, each in memory of its own.

    Raises:
        StateMismatchError: A field that `Experience` does not have in this version of OpenRLHF.
    """
    if not columns:
        return []
    experience = experience_class()
    known = {field.name for field in fields(experience)}
    unknown = sorted(name for name in columns if name not in known and not name.startswith(_INFO_PREFIX))
    if unknown:
        raise StateMismatchError(
            f"Generated samples in the checkpoint have fields that this OpenRLHF does not know: {', '.join(unknown)}.",
            act="Resume with the version of OpenRLHF that saved them.",
        )
    samples: list[Any] = []
    for row in range(num_rows(columns)):
        values: dict[str, Any] = {INFO: {}}
        for name, column in columns.items():
            value = column[row].clone() if isinstance(column, torch.Tensor) else column[row]
            if name.startswith(_INFO_PREFIX):
                values[INFO][name.removeprefix(_INFO_PREFIX)] = value
            else:
                values[name] = value
        samples.append(experience(**values))
    return samples


def _have_same_keys(values: Sequence[Any]) -> bool:
    return all(type(value) is dict and list(value) == list(values[0]) for value in values) and all(
        type(key) is str for key in values[0]
    )


def _stacked(values: list[Any]) -> Any:
    first: Any = values[0]
    if all(
        type(value) is torch.Tensor and value.dtype is first.dtype and value.shape == first.shape for value in values
    ):
        return torch.stack(values)
    return values
