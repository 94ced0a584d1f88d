"""agent-lightning's trainer and rollout manager as far as the extension reads, calls and overrides them.

These classes are the one list of it: a start refuses a version that lacks one of the methods (`versions`), and the
contract tests compare attributes and signatures with the real classes. A leading underscore is a name that has no
public counterpart; such a name is used in this package only, overridden methods aside.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Protocol


class TrainerSection(Protocol):
    """The config's `trainer`: VERL's settings of loop and checkpoints; what only some versions have comes by `get`."""

    default_local_dir: str
    """The output folder."""
    default_hdfs_dir: str | None
    """With it VERL refuses to load, so there is nothing to resume from."""
    resume_mode: str
    """`auto`, `disable` or `resume_path`; rewritten for VERL's load, which has to take the step that was verified."""
    resume_from_path: str | None
    """The step folder of `resume_path`; rewritten with it."""
    save_freq: int
    """The loop reads it at each step, so that a step can be saved out of turn."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value that not every version, or not every config, has."""
        ...


class Config(Protocol):
    """A trainer's config, an OmegaConf `DictConfig`."""

    trainer: TrainerSection
    data: Any
    """Batch sizes, loader and sampler: a saved position fits some of them only."""
    actor_rollout_ref: Any
    """How many rollouts a prompt group has, and whether models are saved in the background."""
    agentlightning: Any
    """Where the extension's own section is, how many groups are in flight, and whether there are hooks."""


class Trainer(Protocol):
    """`AgentLightningRayPPOTrainer`, on VERL's `RayPPOTrainer`."""

    config: Config
    global_steps: int
    """The step that is trained; while one is loaded or saved, that step. VERL sets it when it loads."""
    epoch: int
    """Passes begun; `fit()` adds 1 after loading, so a resume sets it one lower."""
    is_async: bool
    """Whether it pulls ahead of what it trains: only then a checkpoint of VERL's loses inputs."""
    use_critic: bool
    """Whether a step has a second model."""
    train_dataset: Any
    """Its length and rows are what a saved position is compared with."""
    train_dataloader: Any
    """torchdata's `StatefulDataLoader`, which VERL asks for its state at each save."""
    actor_rollout_wg: Any
    """VERL's worker group, set when workers are started: it is waited for where a save goes on in the background."""
    _train_dataloader_iter: Any
    """The pass that pulls take from: a resume opens it at its position."""
    _train_dataloader_buf: Any
    """Rows that are pulled and not enqueued; no version declares it, so it is read with a default."""
    _carry_over_rollouts: list[Any]
    """`EnqueuedRollout`s that no step has trained yet: a checkpoint takes them along."""

    def fit(self) -> Any:
        """Overridden: the output folder belongs to one trainer for as long as it runs."""
        ...

    def _load_checkpoint(self) -> Any:
        """Overridden: the position is put back with the model."""
        ...

    def _save_checkpoint(self) -> Any:
        """Overridden: the position is saved before the model, and the step sealed after it."""
        ...

    def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> Any:
        """Overridden: a step begins with the saved generators, and its end decides about a save and a stop."""
        ...

    def _validate(self, merged: bool = False) -> Any:
        """Overridden: a validation is left when a stop is asked for."""
        ...

    def _rollout(self, gen_batch: Any, is_train: bool) -> Any:
        """Overridden: before the first one the server is asked what it knows."""
        ...

    def _make_rollout_manager(self, manager_cls: type) -> Any:
        """Overridden to extend the class; called for a manager of the extension's own."""
        ...

    def _ensure_agl_client(self) -> Any:
        """Overridden to wait for the server; called, as it is the only way to the client."""
        ...

    def _pause_and_drain_gateway(self, *, reason: str) -> dict[str, Any]:
        """Overridden: a drain does not wait for requests that hang."""
        ...

    def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
        """Overridden: the first pull after a resume is compared with the saved one."""
        ...

    def _next_train_batch_dict_with_size(self, size: int) -> dict[str, Any]:
        """Overridden: what is pulled is noted in the ledger."""
        ...


class RolloutManager(Protocol):
    """`AglRolloutManagerBase`, of which each step makes one."""

    client: Any
    """The manager's HTTP client; replaced by one that waits and tags."""
    _hooks: Any
    """The user's hooks, or None: a hook may post events, so it has to run before events are kept."""
    _rollout_config: dict[str, Any]
    """What a posted rollout gets as its config: one that is created again gets the same."""
    _train_rollout_n: int
    """Rollouts of a prompt group: a sibling's events wait for the others'."""

    def register_model(self, server_addresses: list[str]) -> Any:
        """Overridden: the first call of a rollout, before which nothing is enqueued or waited for."""
        ...

    def _create_rollouts(self, data: dict[str, Any], *, is_train: bool) -> list[Any]:
        """Overridden: tells which rollouts are enqueued."""
        ...

    def _get_rollout(self, rollout_id: str) -> Any:
        """Overridden: each poll goes through it; answers for a rollout that the server has lost."""
        ...

    def _delete_rollout(self, rollout_id: str) -> None:
        """Overridden: what is deleted is no longer known."""
        ...

    def _get_events(self, rollout_id: str, **filters: Any) -> list[Any]:
        """Overridden: answers for a rollout that the server has lost."""
        ...

    def _fetch_rollout_events(self, rollout_id: str) -> tuple[list[Any], list[Any]]:
        """Overridden, and called to keep the events of a finished sibling."""
        ...

    def _post_event(self, rollout_id: str, attempt_id: str, event: Any) -> Any:
        """Overridden: a hook may post to a rollout that the server has lost."""
        ...

    def _run_succeeded_hook(self, rollout: Any) -> None:
        """Overridden: a hook runs once, before the events are kept."""
        ...

    def _run_failed_hook(self, rollout: Any) -> None:
        """Overridden: a hook runs once, before the rollout is deleted."""
        ...


def methods_of(protocol: type) -> dict[str, FunctionType]:
    """Return the methods that one of the classes above declares."""
    return {
        name: value
        for name, value in vars(protocol).items()
        if isinstance(value, FunctionType) and not name.startswith("__")
    }
