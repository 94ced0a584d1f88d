"""Every error this package raises. A leaf: imports nothing of the package.

AsyncCheckpointError
├── ConfigError (ValueError)              a setting in agentlightning.async_checkpoint
├── ActivationError (RuntimeError)        the extension cannot work in this process or with this trainer
├── FolderInUseError (RuntimeError)      another trainer writes into this output folder
├── CheckpointNotFoundError (FileNotFoundError)
│   └── MissingStateError                 a step that must hold an input state has none
├── StateFormatError (ValueError)
│   ├── DamagedStateError                 truncated, altered, empty or not a regular file
│   ├── ForeignFormatError                a whole file, but not written by this package
│   └── UnsupportedVersionError           written by a newer version
├── StateMismatchError (ValueError)       a sound file that does not fit this step or this run
├── UnencodableValueError (TypeError)     an input that the file format cannot carry
├── StateWriteError (OSError)             the input state was not published
└── ServerError (ConnectionError)         the agl-server cannot be reached, or refuses what a resume needs
"""

from __future__ import annotations

from collections.abc import Sequence


class AsyncCheckpointError(Exception):
    """Base of all errors of this package."""


class ConfigError(AsyncCheckpointError, ValueError):
    """`agentlightning.async_checkpoint` holds an unknown key or a value that is not allowed."""


class ActivationError(AsyncCheckpointError, RuntimeError):
    """The extension cannot be switched on here; the message says what to do instead."""


class FolderInUseError(AsyncCheckpointError, RuntimeError):
    """Another trainer writes into this output folder; two would mix their checkpoints."""


class CheckpointNotFoundError(AsyncCheckpointError, FileNotFoundError):
    """A path that was asked for is not a checkpoint folder."""


class MissingStateError(CheckpointNotFoundError):
    """The checkpoint belongs to a run that wrote input states, yet this step has none."""


class StateFormatError(AsyncCheckpointError, ValueError):
    """The bytes of an input state file cannot be used. Raised before anything is unpickled."""


class DamagedStateError(StateFormatError):
    """Truncated, altered, empty, or not a readable regular file."""


class ForeignFormatError(StateFormatError):
    """A whole file of another format, for instance one that the training framework wrote itself."""


class UnsupportedVersionError(StateFormatError):
    """Written by a newer version of this package, in a format this one does not know."""


class StateMismatchError(AsyncCheckpointError, ValueError):
    """A sound input state that belongs to another step, or to a run with other settings."""


class UnencodableValueError(AsyncCheckpointError, TypeError):
    """A value that the file format cannot carry exactly, named by column and row."""


class StateWriteError(AsyncCheckpointError, OSError):
    """The input state was not published; the previous checkpoint stays selected."""


class ServerError(AsyncCheckpointError, ConnectionError):
    """The agl-server cannot be reached, or answers what a resume cannot work with; the checkpoint is untouched."""


def aligned(rows: Sequence[tuple[str, object]]) -> str:
    """Lay out `label: value` rows, indented by two, so that the values start in one column."""
    width = max((len(label) for label, _ in rows), default=0) + 1
    return "\n".join(f"  {label + ':':<{width}} {value}" for label, value in rows)


def describe(fact: str, rows: Sequence[tuple[str, object]], act: str) -> str:
    """Compose an error text: the fact, the saved and current values aligned, the next safe act."""
    return "\n".join(part for part in (fact, aligned(rows), act) if part)
