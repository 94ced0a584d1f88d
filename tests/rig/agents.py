"""The controller and the agents, played: what they do to rollouts, without processes and without a model.

`AgentTable` lives in the server's event loop and changes the server's store between two requests, so nothing races.
It acts when the trainer, having found too little finished, is about to wait: which rollouts finish in a step depends
on the plan alone, never on timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPT_OFFSET = 10
"""Token id of a prompt is this plus the row id: a trained batch tells which rows it holds."""


@dataclass(frozen=True)
class AgentPlan:
    """How the agents behave; without entries every step finishes its B oldest prompt groups.

    Attributes:
        rank: Row -> slowness; among the active groups lower ranks finish first (default 0), then older ones.
        hold: Row -> first step in which it may finish.
        outcome: Row -> `failed`, `silent` (succeeds, but no model request is recorded), `unrewarded` (succeeds, but
            posts no reward) or `overlong` (a prompt beyond the limit, which the trainer drops).
        step_outcome: Step -> the same, for everything that finishes in that step.
    """

    rank: Mapping[int, int] = field(default_factory=dict)
    hold: Mapping[int, int] = field(default_factory=dict)
    outcome: Mapping[int, str] = field(default_factory=dict)
    step_outcome: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitReport:
    """What the trainer saw in one pass over its rollouts, just before it waits.

    Attributes:
        step: Its `global_steps`.
        polled: (num_polled,) rollout ids of one pass, in the order they were read.
        num_groups: Prompt groups that it still needs, or None for all.
        rollout_n: Siblings of a group.
    """

    step: int
    polled: tuple[str, ...]
    num_groups: int | None
    rollout_n: int


class AgentsStuckError(RuntimeError):
    """The plan holds back so many rollouts that the step cannot end."""


def row_of(rollout_input: Any) -> int:
    """The row id that a rollout's input came from."""
    return int(rollout_input["index"])


def model_request(row: int, *, overlong: bool = False) -> dict[str, Any]:
    """Data of a `model_request` event, as the gateway records it for one call."""
    prompt = [PROMPT_OFFSET + row] * (20 if overlong else 2)
    token_ids = [3 + row % 4, 4, 1]
    return {
        "model": "rig/model",
        "request": {"messages": [{"role": "user", "content": f"question {row}"}]},
        "response": {
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "token_ids": token_ids,
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"logprob": -0.5} for _ in token_ids]},
                }
            ],
        },
        "status": "ok",
        "http_status": 200,
    }


class AgentTable:
    """A local controller's memory of rollout ids, and what its agents report.

    Like the real one it never starts an id twice: an id that it has run, gone from the server and created again, is
    marked `succeeded` with no event. The memory outlives trainers and servers; a new table is a restarted controller.

    Attributes:
        starts: (rollout id, row) of every agent start, in order.
        asked: The server's record of the rollout at every agent start, in the same order.
        plan: May be replaced between lives.
    """

    def __init__(self, plan: AgentPlan | None = None) -> None:
        self.plan = plan or AgentPlan()
        self.starts: list[tuple[str, int]] = []
        self.asked: list[Any] = []
        self._ended: dict[str, bool] = {}

    def rows_started(self) -> list[int]:
        """Rows of `starts`."""
        return [row for _, row in self.starts]

    def act(self, report: WaitReport) -> int:
        """Start what is queued, finish what the plan lets finish in this step; runs in the server's loop.

        Returns:
            Number of rollouts that ended.

        Raises:
            AgentsStuckError: Nothing that the trainer waits for can finish.
        """
        from agentlightning.server.store import _rollouts

        num_ended = self._reconcile()
        if not all(rid in _rollouts for rid in report.polled):
            return num_ended  # the server was restarted since: which of them finish depends on all of them
        waiting = [rid for rid in dict.fromkeys(report.polled) if not self._is_terminal(rid)]
        for rid in self._choose(waiting, report):
            self._finish(rid, report.step)
            num_ended += 1
        if waiting and not num_ended:
            rows = [row_of(_rollouts[rid].input) for rid in waiting]
            raise AgentsStuckError(f"Step {report.step} waits for rows {rows}, and the plan holds all of them back.")
        return num_ended

    def _choose(self, waiting: list[str], report: WaitReport) -> list[str]:
        groups = self._groups(waiting, report)
        ready = [group for group in groups if self.plan.hold.get(self._row(group), 0) <= report.step]
        ready.sort(key=lambda group: self.plan.rank.get(self._row(group), 0))
        return [rid for group in ready[: report.num_groups] for rid in group]

    @staticmethod
    def _groups(waiting: list[str], report: WaitReport) -> list[list[str]]:
        """Put siblings together: they are read one after another."""
        from agentlightning.server.store import _rollouts

        groups: list[list[str]] = []
        for rid in waiting:
            row = row_of(_rollouts[rid].input)
            last = groups[-1] if groups else None
            if last and len(last) < report.rollout_n and row_of(_rollouts[last[0]].input) == row:
                last.append(rid)
            else:
                groups.append([rid])
        return groups

    @staticmethod
    def _row(group: list[str]) -> int:
        from agentlightning.server.store import _rollouts

        return row_of(_rollouts[group[0]].input)

    @staticmethod
    def _is_terminal(rollout_id: str) -> bool:
        from agentlightning.schemas import TERMINAL_STATES
        from agentlightning.server.store import _rollouts

        return _rollouts[rollout_id].status.state in TERMINAL_STATES

    def _reconcile(self) -> int:
        """One pass of the local controller, oldest first: start the unknown, close what it has run before."""
        from agentlightning.schemas import RolloutState
        from agentlightning.server.store import _rollouts

        num_ended = 0
        for rid, rollout in list(_rollouts.items()):
            state = rollout.status.state
            if rid not in self._ended:
                if state == RolloutState.QUEUING:
                    self._ended[rid] = False
                    self.starts.append((rid, row_of(rollout.input)))
                    self.asked.append(rollout)
                    self._patch(rid, "running")
                elif state == RolloutState.RUNNING:
                    self._patch(rid, "failed", error_message="local subprocess is not running")
                    num_ended += 1
                continue
            if state == RolloutState.QUEUING:
                self._patch(rid, "running")
            if self._ended[rid] and state in (RolloutState.QUEUING, RolloutState.RUNNING):
                self._patch(rid, "succeeded")
                num_ended += 1
        return num_ended

    def _finish(self, rollout_id: str, step: int) -> None:
        from agentlightning.server.routes.events import record_event
        from agentlightning.server.store import _rollouts

        row = row_of(_rollouts[rollout_id].input)
        outcome = self.plan.step_outcome.get(step, self.plan.outcome.get(row, "ok"))
        if outcome in ("ok", "unrewarded", "overlong"):
            record_event(rollout_id, "0", "model_request", model_request(row, overlong=outcome == "overlong"))
        if outcome in ("ok", "overlong"):
            record_event(rollout_id, "0", "reward", {"value": (row % 5) / 4})
        self._ended[rollout_id] = True
        if outcome == "failed":
            self._patch(rollout_id, "failed", error_message="subprocess exited with code 1")
        else:
            self._patch(rollout_id, "succeeded")

    @staticmethod
    def _patch(rollout_id: str, state: str, **fields: Any) -> None:
        """The same transition as `PATCH /api/rollouts/{id}`: the route's own function, driven to its end."""
        from agentlightning.schemas import RolloutPatch, RolloutStatusPatch
        from agentlightning.server.routes.rollouts import patch_rollout

        patch = RolloutPatch(status=RolloutStatusPatch(state=state, last_attempt_id="0", **fields))  # type: ignore
        coroutine = patch_rollout(rollout_id, patch)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("the route waited for something")
