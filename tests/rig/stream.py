"""What a run pulls whose settings change between its lives, worked out without loader or trainer."""

from __future__ import annotations

from pathlib import Path

from agl_async_ckpt.storage.commit import load_state
from tests.rig.agents import row_of
from tests.rig.record import Life
from tests.rig.settings import RunSettings


class ExpectedStream:
    """The order of rows, epoch by epoch, and how pulls cut it.

    An epoch is a permutation drawn from one generator. torchdata draws once for an epoch without loader workers and
    twice with any number of them, and uses the last draw. A change of the loader batch within an epoch leaves what the
    old batches would still have taken of it to be taken; behind that the new batch cuts.
    """

    def __init__(self, run: RunSettings) -> None:
        import torch

        self._run = run
        self._generator = torch.Generator()
        self._generator.manual_seed(run.seed)
        self._tail: list[int] = []
        self._order: list[int] = []
        self._place = 0
        self.epoch = 0

    def _next_epoch(self) -> None:
        import torch

        self.epoch += 1
        self._place = 0
        self._order = list(range(self._run.n))
        if self._run.shuffle:
            for _ in range(2 if self._run.num_workers else 1):
                self._order = torch.randperm(self._run.n, generator=self._generator).tolist()

    def change(self, run: RunSettings) -> None:
        """Go on under other settings."""
        before, now = _batch(self._run), _batch(run)
        if before != now:
            to_come = (self._run.n - self._place) // before * before
            self._take(to_come % now)
        self._run = run

    def pull(self, size: int) -> list[int]:
        """The next `size` rows."""
        while len(self._tail) < size:
            if not self._order or self._run.n - self._place < _batch(self._run):
                self._next_epoch()
            self._take(_batch(self._run))
        rows, self._tail = self._tail[:size], self._tail[size:]
        return rows

    def _take(self, size: int) -> None:
        self._tail += self._order[self._place : self._place + size]
        self._place += size


def _batch(run: RunSettings) -> int:
    return run.gen_batch_size or run.B


def assert_streams_on(lives: list[Life], runs: list[RunSettings], folder: Path) -> None:
    """Each life pulled what was next, and trained what was pulled: nothing is lost, nothing comes twice.

    Args:
        lives: In order, each but the first resumed from the last save of the one before, at which that had ended.
        runs: Their settings.
        folder: The output folder of the last one.
    """
    expected = ExpectedStream(runs[0])
    pulled: list[int] = []
    trained: list[int] = []
    for number, (life, run) in enumerate(zip(lives, runs, strict=True)):
        if number:
            expected.change(run)
        for step, done in life.steps.items():
            rows = expected.pull(len(done.pulled))
            assert done.pulled == rows, f"pulled in step {step} of life {number}"
            assert done.epoch == expected.epoch, f"epoch after the pull of step {step} of life {number}"
            pulled += done.pulled
            trained += done.trained
            assert len(done.trained) == run.B, f"trained in step {step} of life {number}"
            assert done.num_rollouts == run.B * run.rollout_n, f"siblings in step {step} of life {number}"
    assert trained == pulled[: len(trained)], "every step trains the oldest rows in flight"
    state = load_state(folder / f"global_step_{max(lives[-1].saves)}")
    in_flight = [row_of(group.rollouts[0].enqueued["input"]) for group in state.carry_over]
    assert in_flight == pulled[len(trained) :], "the rest is in flight"
