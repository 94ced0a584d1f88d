"""Ledgers of runs that are told, not trained: a sequential loader, and resumes of every kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from agl_async_ckpt.ledger.audit import Audit, audit_ledger
from agl_async_ckpt.ledger.entry import End, Entry, InputName, ResumeKind, Start, Step, to_line
from agl_async_ckpt.ledger.reader import Ledger
from agl_async_ckpt.storage.layout import LEDGER_NAME


class Story:
    """A run of n/B/A whose loader goes through `rows` in order, epoch after epoch.

    Args:
        rows: Names of the dataset's rows.
        batch: B, and rows of a loader batch.
        groups: A.
    """

    def __init__(self, rows: Sequence[InputName], batch: int, groups: int) -> None:
        self.rows, self.batch, self.groups = list(rows), batch, groups
        self.entries: list[Entry] = []
        self.life = self.step_number = 0
        self.position = 0  # rows that the loader has handed out, over all passes
        self.in_flight: list[InputName] = []
        self.buffered: list[InputName] = []
        self.run_id = "run"
        self._saved: dict[int, tuple[int, list[InputName], list[InputName]]] = {0: (0, [], [])}

    @property
    def per_pass(self) -> int:
        """Rows of a pass."""
        return len(self.rows) // self.batch * self.batch

    @property
    def epoch(self) -> int:
        """As the trainer counts it."""
        return max(0, self.position - 1) // self.per_pass + 1

    @property
    def loader_rows(self) -> int:
        """Rows of the current pass that were handed out."""
        return self.position - (self.epoch - 1) * self.per_pass

    def start(
        self,
        step: int = 0,
        *,
        resume: ResumeKind = "none",
        lose_in_flight: bool = False,
        lose_buffered: bool = False,
        loader: str = "restored",
        epoch: int | None = None,
        is_fork: bool = False,
        resumed_from: str | None = None,
    ) -> Story:
        """Begin a life from the checkpoint of `step`, with the loader `restored`, or `fresh`: at its first row."""
        position, in_flight, buffered = copy.deepcopy(self._saved[step])
        self.life, self.step_number, self.position = self.life + 1, step, position
        self.in_flight = [] if lose_in_flight else in_flight
        self.buffered = [] if lose_buffered else buffered
        counted = self.epoch if epoch is None else epoch
        if loader == "fresh":
            self.position -= self.loader_rows
        self.entries.append(
            Start(
                run_id=self.run_id,
                life=self.life,
                step=step,
                epoch=counted,
                resume=resume,
                resumed_from=resumed_from or (f"out/global_step_{step}" if step else None),
                is_fork=is_fork,
                parent_run_id=None,
                in_flight=tuple(self.in_flight),
                buffered=tuple(self.buffered),
                loader_rows=0 if loader == "fresh" else self.loader_rows,
                num_rows=len(self.rows),
                loader_batch=self.batch,
                drop_last=True,
                time=0.0,
            )
        )
        self._epoch_shift = counted - self.epoch
        return self

    def steps(self, number: int) -> Story:
        """Do some steps that train their oldest groups."""
        for _ in range(number):
            self.step()
        return self

    def step(
        self,
        *,
        finish: Sequence[InputName] | None = None,
        drop: Sequence[InputName] = (),
        no_batch: bool = False,
        record: bool = True,
    ) -> Story:
        """Do one step: pull, finish B groups (the oldest, or `finish`), of which the trainer drops `drop`."""
        self.step_number += 1
        drawn: list[tuple[int, int]] = []
        wanted = self.groups - len(self.in_flight)
        while len(self.buffered) < wanted:
            for _ in range(self.batch):
                self.buffered.append(self.rows[self.position % self.per_pass])
                self.position += 1
            drawn.append((self.epoch + self._epoch_shift, self.batch))
        pulled, self.buffered = self.buffered[:wanted], self.buffered[wanted:]
        self.in_flight += pulled
        finished = list(self.in_flight[: self.batch] if finish is None else finish)
        for name in finished:
            self.in_flight.remove(name)
        dropped = finished if no_batch else [name for name in finished if name in drop]
        if record:
            self.entries.append(
                Step(
                    run_id=self.run_id,
                    life=self.life,
                    step=self.step_number,
                    epoch=self.epoch + self._epoch_shift,
                    pulled=tuple(pulled),
                    drawn=tuple(drawn),
                    trained=tuple(name for name in finished if name not in dropped),
                    dropped_by_trainer=tuple(dropped),
                    in_flight=tuple(self.in_flight),
                    buffered=tuple(self.buffered),
                    loader_rows=self.loader_rows,
                    time=0.0,
                )
            )
        self._saved[self.step_number] = copy.deepcopy((self.position, self.in_flight, self.buffered))
        return self

    def end(self) -> Story:
        """Training is over."""
        self.entries.append(End(self.run_id, self.life, self.step_number, 0.0))
        return self

    def audit(self) -> Audit:
        """Audit it."""
        return audit_ledger(Ledger(Path("out") / LEDGER_NAME, tuple(self.entries)))

    def write(self, folder: Path) -> Path:
        """Write it as the ledger of an output folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEDGER_NAME).write_bytes(b"".join(map(to_line, self.entries)))
        return folder


def row(position: int) -> InputName:
    """Name of a dataset row."""
    return f"{position:016x}@{position}"


def dataset(num_rows: int) -> list[InputName]:
    """Names of all rows of a dataset that knows their positions."""
    return [row(position) for position in range(num_rows)]
