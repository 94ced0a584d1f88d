"""What the user sees while the demo runs: what is being done, one line per step, the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cpu_training.preemption import Preemption
from cpu_training.rows import RowComparison
from cpu_training.settings import ASYNC_BATCH, SAVE_EVERY, TRAIN_BATCH, Plan
from cpu_training.verdict import Step, Verdict


def ids(inputs: Sequence[int]) -> str:
    """Input ids as a short text."""
    return " ".join(str(i) for i in inputs) or "-"


class Screen:
    """Plain lines when piped, colours and a spinner on a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._started = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the start."""
        elapsed = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed:5.0f} s[/dim]  {escape(text)}", style=style, soft_wrap=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Announce something that takes a while; on a terminal a spinner turns until the block ends."""
        self.say(text)
        with self.spinner():
            yield

    @contextmanager
    def spinner(self) -> Iterator[None]:
        """A sign of life on a terminal until the block ends; nothing when piped."""
        with self._console.status("working"):
            yield

    def introduce(self, plan: Plan, *, protected: bool, run_dir: Path) -> None:
        """What is going to happen."""
        if plan.preempt:
            kills = (
                f"The trainer's process group gets a SIGTERM in step {plan.kill_after_step}; then it is started again."
            )
        elif plan.kill_after_step is not None:
            kills = f"The trainer is killed after step {plan.kill_after_step} and resumes from its last checkpoint."
        else:
            times = f"{plan.kills} times" if plan.kills > 1 else "once"
            kills = f"The trainer is killed {times} at a random moment (seed {plan.seed}) and resumes each time."
        self._console.print(
            f"A real asynchronous training run on CPU, [bold]{'with' if protected else 'WITHOUT'}[/bold] "
            f"agl-async-ckpt: {plan.steps} steps, {TRAIN_BATCH} inputs trained per step, {ASYNC_BATCH} requested at a "
            f"time, a checkpoint every {SAVE_EVERY} steps. {kills} "
            "Numbers in the lines below are input ids. This takes a few minutes.",
        )
        self._console.print(f"Logs, checkpoints and events: {run_dir}", soft_wrap=True)

    def step(self, step: Step) -> None:
        """The line of one step."""
        parts = Text.assemble(
            (f"  step {step.step:>2}", "bold"),
            f"  epoch {step.epoch}",
            f"  pulled {ids(step.pulled):<{3 * ASYNC_BATCH - 1}}",
            ("  trained " + f"{ids(step.trained):<{3 * TRAIN_BATCH - 1}}", "green"),
            ("  buffered " + f"{ids(step.buffered):<2}", "cyan"),
            ("  in flight " + f"{ids(step.in_flight):<{3 * (ASYNC_BATCH - TRAIN_BATCH) - 1}}", "yellow"),
            (f"  {step.seconds:4.1f} s", "dim"),
        )
        if step.rows == 0:
            parts.append("  nothing to train", "red")
        self._console.print(parts, soft_wrap=True)

    def restored(self, counts: Mapping[str, int]) -> None:
        """What a resume has done about the rollouts that were in flight, in the words of the trainer's metrics."""
        labels = {
            "num_adopted_rollouts": "still on the server and adopted",
            "num_reused_finished_rollouts": "finished before and reused",
            "num_recreated_rollouts": "created again",
            "num_rerun_rollouts": "run again because they failed or ended without a trainer",
            "num_reclaimed_rollouts": "orphans removed",
        }
        parts = [f"{counts[name]} {label}" for name, label in labels.items() if counts.get(name)]
        text = (
            f"{counts['num_restored_groups']} prompt groups in flight restored; rollouts: {', '.join(parts) or 'none'}"
        )
        self._console.print(f"           {text}", style="dim", soft_wrap=True)

    def verdict(self, verdict: Verdict, *, protected: bool) -> None:
        """The table at the end."""
        table = Table(
            title=f"{'With' if protected else 'WITHOUT'} agl-async-ckpt, against the uninterrupted stream, "
            f"by step {verdict.steps}",
            title_justify="left",
        )
        table.add_column("")
        table.add_column("inputs", justify="right")
        table.add_column("which")
        rows = [
            ("trained once", verdict.trained_once, "green"),
            ("in flight at the end", verdict.in_flight, "yellow"),
            ("buffered at the end", verdict.buffered, "cyan"),
            ("lost", verdict.lost, "bold red" if verdict.lost else "green"),
            ("repeated", verdict.repeated, "bold red" if verdict.repeated else "green"),
        ]
        if verdict.ahead:
            rows.append(("taken ahead of turn", verdict.ahead, "red"))
        for label, inputs, style in rows:
            table.add_row(label, str(len(inputs)), ids(inputs), style=style)
        self._console.print()
        self._console.print(table)
        same = "that of the uninterrupted run" if verdict.same_pull_order else "NOT that of the uninterrupted run"
        for place in dict.fromkeys(verdict.lost_where.values()):
            there = [i for i, each in verdict.lost_where.items() if each == place]
            self._console.print(f"  lost: {ids(there)} ({place}, gone after the resume)", style="red")
        self._console.print(f"  order of pulling: {same}")
        self._console.print(
            f"  lost {len(verdict.lost)}, repeated {len(verdict.repeated)}",
            style="bold green" if verdict.holds else "bold red",
        )

    def preemption(self, preemption: Preemption) -> None:
        """How the training stopped, and what was wrong with it."""
        self._console.print(f"  {preemption}", soft_wrap=True)
        if not preemption.problems:
            text = f"checkpoint of step {preemption.step} complete, saved once, no rollout left on the server"
            self._console.print(f"  {text}", style="bold green", soft_wrap=True)
        for problem in preemption.problems:
            self._console.print(f"  {problem}", style="bold red", soft_wrap=True)

    def rows(self, rows: RowComparison) -> None:
        """How the rows of the updates compare, and the first differences."""
        self._console.print(f"  {rows}", style="bold green" if rows.holds else "bold red", soft_wrap=True)
        for problem in rows.problems[:3]:
            self._console.print(f"  {escape(problem)}", style="red", soft_wrap=True)

    def error(self, text: str) -> None:
        """What went wrong, on stderr."""
        Console(stderr=True, highlight=False).print(escape(text), style="red", soft_wrap=True)
