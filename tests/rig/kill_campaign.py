"""A campaign of SIGKILLs: lives of the rig in processes of their own, killed at random moments, resumed until done.

`make soak N=1000 SEED=7`, or `python -m tests.rig.kill_campaign 1000 --seed 7`. agl-server, controller and agents
live outside the killed process. A moment is a point of the rig (`tests.rig.life.POINTS`, or the fork) that is passed,
for the how-manyth time in this life, and a share of the time that usually goes by until the next point. The seed fixes
these choices; where exactly the process is at that moment is up to the machine, as it is with any kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.rig.life import quiet
from tests.rig.nursery import Nursery, nursery_of
from tests.rig.record import Life, lineage, rows_trained
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

RUNS: tuple[RunSettings, ...] = (
    settings("14/4/6", epochs=2, shuffle=True),
    settings("24/2/5", max_ckpt_to_keep=1, use_critic=True),
    settings("14/4/6", epochs=2, shuffle=True, num_workers=2),
    settings("12/2/7", epochs=2, rollout_n=2, shuffle=True),
    settings("24/2/5", max_ckpt_to_keep=1, use_critic=True, num_workers=2, shuffle=True, payload="rich"),
    settings("23/4/6", epochs=2, gen_batch_size=3, shuffle=True),
    settings("12/2/5", epochs=2, rollout_n=2, num_workers=2, max_ckpt_to_keep=2),
    settings("24/2/5", save_freq=2, shuffle=True),
)
"""Tail or none, in epochs; 0 or 2 loader workers; one, two or all checkpoints kept; with a critic; rollout.n 1 or 2."""

LIVES = "tests.rig.child:live"
"""What the children of the nursery run."""
START = "start"
USUAL_S = 0.05
"""First guess of the time between two points; replaced by what is measured."""
MAX_LIVES_PER_STEP = 30
LIFE_WAIT_S = 120.0


@dataclass(frozen=True)
class Moment:
    """When a life is killed.

    Attributes:
        point: `start` or a point of the rig.
        pass_number: At which time, counted in this life, the point is passed.
        share: Of the usual time until the next point, 0 to 1.
        spare_workers: Only the trainer is killed, as the kernel does when memory runs out; its loader workers live on
            for seconds.
    """

    point: str
    pass_number: int
    share: float
    spare_workers: bool = False


@dataclass
class Figures:
    """What a campaign did and found."""

    seed: int
    kills: int = 0
    runs: int = 0
    lives: int = 0
    server_restarts: int = 0
    spared_workers: int = 0
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    killed_after: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        places = ", ".join(f"{point} {count}" for point, count in sorted(self.killed_after.items()))
        return (
            f"{self.kills} kills in {self.runs} runs ({self.lives} lives, {self.server_restarts} server restarts, "
            f"{self.spared_workers} with loader workers left alive): lost {self.lost}, repeated {self.repeated}; "
            f"{self.seconds:.0f} s, seed {self.seed}\n  killed after: {places}"
        )


class Campaign:
    """Kills lives until `num_kills` are reached; the run in progress is then brought to its end.

    Args:
        num_kills: How many.
        seed: Of all choices.
        folder: Scratch folder.
        server: The agl-server that outlives the trainers.
        nursery: Forks `tests.rig.child:live`.
    """

    def __init__(self, num_kills: int, seed: int, folder: Path, server: AglServer, nursery: Nursery) -> None:
        self.figures = Figures(seed)
        self._num_kills = num_kills
        self._random = random.Random(seed)
        self._folder = folder
        self._server = server
        self._nursery = nursery
        self._usual_s: dict[str, float] = {}
        self._fifo_path = folder / "passed"
        os.mkfifo(self._fifo_path)

    def run(self) -> Figures:
        """Do it.

        Raises:
            AssertionError: A life failed, or a run is not what the uninterrupted one is; names seed, run and moments.
        """
        began = time.monotonic()
        # Open for reading and writing: it must not report an end when no child has it open.
        self._fifo = os.open(self._fifo_path, os.O_RDWR | os.O_NONBLOCK)
        try:
            while self.figures.kills < self._num_kills:
                self._one_run(RUNS[self.figures.runs % len(RUNS)])
                self.figures.runs += 1
        finally:
            os.close(self._fifo)
            self.figures.seconds = time.monotonic() - began
        return self.figures

    def _one_run(self, run: RunSettings) -> None:
        run = replace(run, seed=self._random.randrange(2))
        folder = self._folder / f"run-{self.figures.runs}"
        folder.mkdir()
        truth = uninterrupted(run, self._server)
        self._server.reset()
        lives: list[Life] = []
        moments: list[Moment | None] = []
        try:
            while not (lives and lives[-1].finished):
                assert len(lives) < MAX_LIVES_PER_STEP * len(truth.steps), "the run does not get on"
                if lives and self._random.random() < 0.15:
                    with quiet():
                        self._server.restart()
                    self.figures.server_restarts += 1
                moments.append(self._moment(run) if self.figures.kills < self._num_kills else None)
                lives.append(self._one_life(run, folder, len(lives), moments[-1]))
            self._judge(truth, lives, folder / "out")
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(
                f"seed {self.figures.seed}, run {self.figures.runs} of {run}, in {folder}; lives ended at\n"
                + "\n".join(f"  {number}: {moment}" for number, moment in enumerate(moments))
                + f"\n{error}"
            ) from error

    def _moment(self, run: RunSettings) -> Moment:
        draw = self._random
        points = [START, "loaded", "pulled", "trained", "updated", "save", "actor_saved", "saved"]
        if run.use_critic:
            points.append("critic_saved")
        return Moment(
            draw.choice(points),
            draw.choice((1, 1, 1, 2)),
            draw.random(),
            spare_workers=run.num_workers > 0 and draw.random() < 0.2,
        )

    def _one_life(self, run: RunSettings, folder: Path, number: int, moment: Moment | None) -> Life:
        name = folder / f"life-{number}"
        request = {
            "settings": json.loads(run.to_json()),
            "out_dir": str(folder / "out"),
            "base_url": self._server.url,
            "record": f"{name}.jsonl",
            "status": f"{name}.status",
            "log": f"{name}.log",
            "passed": str(self._fifo_path),
        }
        pid = self._nursery.fork(request)
        pidfd = os.pidfd_open(pid)
        self.figures.lives += 1
        try:
            self._watch(pid, pidfd, moment)
        finally:
            os.close(pidfd)
            _kill(pid)  # whatever is left of its session
        life = Life.from_file(Path(request["record"]))
        if not life.finished:
            path = Path(request["log"])
            log = path.read_text() if path.exists() else ""  # killed before it had opened it
            assert "Traceback" not in log, log
        return life

    def _watch(self, pid: int, pidfd: int, moment: Moment | None) -> None:
        """Follow a life until it has ended, by itself or at its moment."""
        last, since, num_passed = START, time.monotonic(), Counter({START: 1})
        deadline = since + LIFE_WAIT_S
        kill_at: float | None = None
        while True:
            if moment is not None and kill_at is None and num_passed[moment.point] == moment.pass_number:
                kill_at = since + moment.share * self._usual_s.get(moment.point, USUAL_S)
            now = time.monotonic()
            assert now < deadline, f"process {pid} did not end; it has last passed {last}"
            if kill_at is not None and now >= kill_at and moment is not None:
                self._end(pid, pidfd, moment, last)
                return
            ready, *_ = select.select([self._fifo, pidfd], [], [], max(0.0, (kill_at or deadline) - now))
            if self._fifo in ready:
                now = time.monotonic()
                for point in self._read_points():
                    usual = self._usual_s.get(last, now - since)
                    self._usual_s[last] = usual + 0.2 * (now - since - usual)
                    last, since = point, now
                    num_passed[point] += 1
            elif pidfd in ready:
                return

    def _end(self, pid: int, pidfd: int, moment: Moment, last: str) -> None:
        if moment.spare_workers:
            os.kill(pid, signal.SIGKILL)
            self.figures.spared_workers += 1
        else:
            _kill(pid)
        assert select.select([pidfd], [], [], 30)[0], f"process {pid} outlived SIGKILL"
        last = ([last, *self._read_points()])[-1]
        self.figures.kills += 1
        self.figures.killed_after[last] += 1

    def _read_points(self) -> list[str]:
        with contextlib.suppress(BlockingIOError):
            return [line.split()[0] for line in os.read(self._fifo, 65536).decode().splitlines()]
        return []

    def _judge(self, truth: Life, lives: list[Life], out_dir: Path) -> None:
        # A life that was killed before it had loaded anything has no place in the lineage.
        lives = [life for life in lives if life.restored is not None]
        have = Counter(rows_trained(lineage(*lives)))
        expected = Counter(rows_trained(truth.steps))
        lost, repeated = (expected - have).total(), (have - expected).total()
        self.figures.lost += lost
        self.figures.repeated += repeated
        assert (lost, repeated) == (0, 0), f"lost {expected - have}, repeated {have - expected}"
        assert_continues(truth, *lives)
        left = [str(path) for path in out_dir.rglob("*.tmp")]
        assert not left, f"left behind: {left}"


def _kill(pid: int) -> None:
    """SIGKILL a life and its session; between the fork and `setsid` it has none of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kill_campaign", description=__doc__)
    parser.add_argument("kills", type=int, help="how many SIGKILLs")
    parser.add_argument("--seed", type=int, help="of all choices (default: a random one, printed)")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)  # noqa: T201 - a command
    with tempfile.TemporaryDirectory(prefix="kill-campaign-") as folder, nursery_of(LIVES, Path(folder)) as nursery:
        with quiet():
            server = AglServer().start()
        try:
            print(Campaign(args.kills, seed, Path(folder), server, nursery).run())  # noqa: T201
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
