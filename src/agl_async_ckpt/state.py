"""The input position of a run after one optimizer step, as plain frozen data. No I/O, no framework imports.

What a checkpoint must hold so that the resumed run pulls and trains what the uninterrupted run would have:

    trained(1..N) + in flight at N + buffered at N == everything pulled by step N
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_async_ckpt.exceptions import StateMismatchError

Batch = Mapping[str, Any]
"""A loader batch: column name -> torch.Tensor, numpy.ndarray or list, all of one leading length."""


def num_rows(batch: Batch | None) -> int:
    """Count the rows of a loader batch; 0 for None and for a batch without columns."""
    if not batch:
        return 0
    return len(next(iter(batch.values())))


@dataclass(frozen=True)
class FinishedRollout:
    """What the server held of a rollout that had ended: kept, so that no token is generated twice.

    Attributes:
        record: The server's rollout record (JSON).
        raw_events: Events as `GET /api/rollouts/{id}/events` returns them, in order.
        triplet_events: The same in the `format=triplet` form (token ids, log-probs, reward).
    """

    record: Mapping[str, Any]
    raw_events: Sequence[Mapping[str, Any]] = ()
    triplet_events: Sequence[Mapping[str, Any]] = ()

    @property
    def has_failed(self) -> bool:
        """Whether it ended in failure."""
        status: Mapping[str, Any] = self.record.get("status") or {}
        return status.get("state") == "failed"


@dataclass(frozen=True)
class InFlightRollout:
    """One enqueued rollout of a prompt group.

    Attributes:
        enqueued: Every field of agent-lightning's `EnqueuedRollout`, by name; `sample_idx_in_step` is the training
            sort key.
        request: The body posted to create it (`input`, `is_train`, `config`, `metadata`; hooks may change each per
            sibling), or None if it was not seen. Holds no rollout id: an id is never created twice.
        finished: Set if the rollout had ended and its tokens are kept.
        is_fresh: Added when the group grew; never on a server, and never in a file.
    """

    enqueued: Mapping[str, Any]
    request: Mapping[str, Any] | None = None
    finished: FinishedRollout | None = None
    is_fresh: bool = False

    @property
    def rollout_id(self) -> str:
        """The id on the server that held it."""
        return str(self.enqueued["rollout_id"])


@dataclass(frozen=True)
class PromptGroup:
    """The rollouts of one input, in order; the unit that is in flight.

    Attributes:
        data_id: agent-lightning's id of the group.
        rollouts: (rollout.n,) siblings, in the order they were enqueued.
    """

    data_id: str
    rollouts: tuple[InFlightRollout, ...]

    @property
    def step(self) -> int:
        """The step that enqueued the group."""
        return int(self.rollouts[0].enqueued["step"])


@dataclass(frozen=True)
class RngState:
    """Global random generators of the driver process.

    Attributes:
        python: `random.getstate()`.
        numpy: `numpy.random.get_state()`.
        torch: `torch.get_rng_state()`, a uint8 tensor.
    """

    python: Any
    numpy: Any
    torch: Any


@dataclass(frozen=True)
class Fingerprint:
    """What the inputs come from.

    Attributes:
        must_match: A resume is refused if one of these differs (dataset length, columns, content, seed, shuffle,
            sampler class, drop_last).
        recorded: For messages and for people; a change is handled exactly (loader batch, A, B, workers, rollout.n).
    """

    must_match: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recorded: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class InputState:
    """Everything about the inputs after `global_step` optimizer steps.

    Attributes:
        global_step: Optimizer steps done.
        epoch: As the trainer counts it while training, 1-based.
        exhausted: The loader has handed out the last batch of `epoch`, whether or not StopIteration was seen.
        loader_state: `StatefulDataLoader.state_dict()`.
        buffered_batch: Rows pulled from the loader and not yet enqueued, or None.
        carry_over: (num_groups,), oldest first.
        num_dropped_groups: Prompt groups in flight that `in_flight: drop` left out of `carry_over`.
        rng_state: Of the driver.
        fingerprint: What the inputs come from.
        run_id: Of the output folder that this state was saved in.
        parent_run_id: Of the run it was forked from, if any.
        written_by: Package name -> version.
    """

    global_step: int
    epoch: int
    exhausted: bool
    loader_state: Mapping[str, Any]
    buffered_batch: Batch | None
    carry_over: tuple[PromptGroup, ...]
    rng_state: RngState | None
    fingerprint: Fingerprint
    run_id: str
    parent_run_id: str | None = None
    written_by: Mapping[str, str] = field(default_factory=dict[str, str])
    num_dropped_groups: int = 0

    def __post_init__(self) -> None:
        if self.global_step < 0:
            raise StateMismatchError(f"global_step must be 0 or more, got {self.global_step}.")
        if self.epoch < 1:
            raise StateMismatchError(f"epoch is 1-based, got {self.epoch}.")

    @property
    def num_buffered(self) -> int:
        """Inputs in `buffered_batch`."""
        return num_rows(self.buffered_batch)

    @property
    def num_in_flight(self) -> int:
        """Prompt groups enqueued and not yet trained."""
        return len(self.carry_over)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers that `inspect` shows without unpickling."""
        rollouts = [rollout for group in self.carry_over for rollout in group.rollouts]
        return {
            "num_buffered_inputs": self.num_buffered,
            "num_carry_over_groups": self.num_in_flight,
            "num_carry_over_rollouts": len(rollouts),
            "num_finished_rollouts": sum(rollout.finished is not None for rollout in rollouts),
        }
