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
│   └── UnsupportedVersionError           of a format version that this package does not read
├── StateMismatchError (ValueError)       a sound file that does not fit this step or this run
├── UnencodableValueError (TypeError)     an input that the file format cannot carry
├── StateWriteError (OSError)             the input state was not published
├── ServerError (ConnectionError)         the agl-server cannot be reached, or refuses what is needed
│   └── UnknownRolloutError               it does not know a rollout, which can be created again
└── UsageError                            a command, or a picture of a run, that cannot be had as it was asked for

Not errors: a training that was asked to stop, has saved, and has ended before its last step.

TrainingStopped (Exception)               out of `fit()`, in the process of the trainer
StopRequested (SystemExit)                out of `run_ppo`, in the driver
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[tuple[str, object]]
"""Names and values, in the order in which they are shown."""


class AsyncCheckpointError(Exception):
    """Base of all errors of this package: made of data, which `str()` composes and nothing takes apart again.

    Attributes:
        fact: What is wrong, in sentences, with its path.
        rows: What belongs to it by name: the saved value and the current one, or each thing that was found.
        act: The next safe act; empty where the fact says it all.
    """

    def __init__(self, fact: str, rows: Rows = (), act: str = "") -> None:
        super().__init__(fact)
        self.fact = fact
        self.rows = tuple(rows)
        self.act = act

    @property
    def said(self) -> str:
        """The fact and its rows, without the act."""
        return compose(self.fact, self.rows)

    def __str__(self) -> str:
        return compose(self.fact, self.rows, self.act)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fact, self.rows, self.act), vars(self)


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
    """Written by another version of this package, in a format version that this one does not read."""


class StateMismatchError(AsyncCheckpointError, ValueError):
    """A sound input state that belongs to another step, or to a run with other settings."""


class UnencodableValueError(AsyncCheckpointError, TypeError):
    """A value that the file format cannot carry exactly, named by column and row."""


class StateWriteError(AsyncCheckpointError, OSError):
    """The input state was not published; the previous checkpoint stays selected.

    Attributes:
        errno: Of the operating system's error, if it was one.
    """

    def __init__(self, fact: str, rows: Rows = (), act: str = "", *, errno: int | None = None) -> None:
        super().__init__(fact, rows, act)
        self.errno = errno


class ServerError(AsyncCheckpointError, ConnectionError):
    """The agl-server cannot be reached, or answers what cannot be worked with; the checkpoint is untouched."""


class UnknownRolloutError(ServerError):
    """The agl-server does not know a rollout. Caught where the rollout can be created again."""


class UsageError(AsyncCheckpointError):
    """What was asked for cannot be done as it was asked for: exit code 2 of the command."""


EXIT_STOPPED = 75
"""Exit code of a driver whose training was stopped on request: EX_TEMPFAIL of sysexits.h, "try again later".

Neither success (0), nor a failure of Python or of the command line (1, 2), nor death by a signal (128 and above).
"""


class StopRequested(SystemExit):
    """`run_ppo` ended because it was asked to; the training is not finished, and a new start continues it.

    A SystemExit: not caught, it ends the process with `EXIT_STOPPED` and without a traceback, past every
    `except Exception` that would treat it as a failure of the training, or go on as if it had finished.

    Attributes:
        step: The last step that was trained; None if the trainer did not say in time.
        saved: Whether that step has a checkpoint; False if there was nothing new to save, or no answer in time.
        code: `EXIT_STOPPED`.
    """

    def __init__(self, message: str, step: int | None = None, *, saved: bool = False) -> None:
        super().__init__(message)
        self.step = step
        self.saved = saved
        self.code = EXIT_STOPPED


class TrainingStopped(Exception):  # noqa: N818 - not an error
    """`fit()` ended because it was asked to. An Exception: Ray ends an actor that raises a SystemExit.

    Attributes:
        step: The last step that was trained.
        saved: Whether this life has saved it; False if this life has trained nothing.
    """

    def __init__(self, message: str, step: int, saved: bool) -> None:
        super().__init__(message, step, saved)
        self.step = step
        self.saved = saved

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[TrainingStopped], tuple[object, ...]]:
        return TrainingStoppedElsewhere, self.args


class TrainingStoppedElsewhere(TrainingStopped, SystemExit):
    """What a `TrainingStopped` of another process is: a SystemExit as well.

    So a driver script that knows nothing of this package ends with `EXIT_STOPPED`, and without a traceback, too. Ray
    raises a subclass of it and of its own RayTaskError, made without the `__init__` of either.
    """

    @property
    def code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`EXIT_STOPPED`; the attribute of SystemExit is unset in what Ray makes."""
        return EXIT_STOPPED


def aligned(rows: Rows) -> str:
    """Lay out `label: value` rows, indented by two, so that the values start in one column."""
    width = max((len(label) for label, _ in rows), default=0) + 1
    return "\n".join(f"  {label + ':':<{width}} {value}" for label, value in rows)


def compose(fact: str, rows: Rows = (), act: str = "") -> str:
    """Compose a text for people: the fact, the saved and current values aligned, the next safe act."""
    return "\n".join(part for part in (fact, aligned(rows), act) if part)
