"""Record what the trainer pulls, trains, buffers and keeps in flight, as JSON lines. Records only: changes nothing.

The recorder is a subclass of whatever trainer class the run uses: stock and protected runs are measured alike.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import wrapt

from cpu_training.settings import LIFE_VARIABLE, RUN_DIR_VARIABLE

EVENTS_FILE = "events.jsonl"
RESPONSE_FIELDS = {"response": "responses", "mask": "response_mask", "log_probs": "rollout_log_probs"}
"""What is recorded of a response -> VERL's name; log-probs are the ones that came with the tokens."""
METRICS = "training/async_ckpt/"
"""Prefix of the trainer metrics of agl-async-ckpt; a stock run has none."""


def record(event: str, **values: Any) -> None:
    """Append one event; a single write, so that lines of a process killed at any instant stay whole."""
    line = {"event": event, "life": int(os.environ[LIFE_VARIABLE]), "time": time.time(), **values}
    path = Path(os.environ[RUN_DIR_VARIABLE]) / EVENTS_FILE
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


class EventReader:
    """Reads the events of a run while it is being written, each once."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS_FILE
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call; an unfinished last line is left for the next one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            chunk = file.read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def install() -> None:
    """Swap the trainer class for the recording one when its module is imported; call after other such swaps."""
    wrapt.register_post_import_hook(_swap, "agentlightning.verl.trainer")


def _swap(module: Any) -> None:
    record("trainer_imported")
    module.AgentLightningRayPPOTrainer = recording_class(module.AgentLightningRayPPOTrainer)


def _groups(rollouts: Iterable[Any]) -> dict[str, int]:
    """Data id -> input id of the prompt groups that `rollouts` belong to, in order of first appearance."""
    return {rollout.data_id: int(rollout.input["input_id"]) for rollout in rollouts}


def _rows(batch: dict[str, Any] | None) -> list[int]:
    return [] if not batch else [int(i) for i in batch["input_id"]]


def rows_of_update(batch: Any, inputs: Mapping[str, int]) -> list[dict[str, Any]]:
    """What an update has trained: the rows, without padding, of each group.

    Args:
        batch: As `_train_step` returns it, a `DataProto`.
        inputs: Data id -> input id of the groups that had completed.
    """
    rows: dict[str, list[dict[str, Any]]] = {data_id: [] for data_id in inputs}
    tensors = batch.batch
    width = tensors["prompts"].shape[1]
    for i, data_id in enumerate(batch.non_tensor_batch["data_id_list"]):
        real = tensors["attention_mask"][i].bool()
        rows[str(data_id)].append(
            {
                "prompt": tensors["prompts"][i][real[:width]].tolist(),
                **{
                    field: tensors[name][i][real[width:]].tolist() if name in tensors else None
                    for field, name in RESPONSE_FIELDS.items()
                },
                "score": float(tensors["token_level_scores"][i].sum()),
            }
        )
    return [{"input": inputs[data_id], "rows": trained} for data_id, trained in rows.items()]


def recording_class(base: Any) -> Any:
    """A subclass of the trainer class `base` that records."""

    class RecordingTrainer(base):
        def init_workers(self) -> Any:
            record("workers_starting")
            result = super().init_workers()
            record("workers_ready")
            return result

        def _load_checkpoint(self) -> Any:
            result = super()._load_checkpoint()
            record("loaded", step=self.global_steps, pid=os.getpid())
            return result

        def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
            batch = super()._next_train_batch_dict_for_rollout()
            # The trainer sets the attribute when it first buffers something.
            tail = getattr(self, "_train_dataloader_buf", None)
            record("pulled", step=self.global_steps, epoch=self.epoch, inputs=_rows(batch), buffered=_rows(tail))
            return batch

        def _make_rollout_manager(self, manager_cls: Any) -> Any:
            manager = super()._make_rollout_manager(manager_cls)
            wait = getattr(manager, "enqueue_and_wait_until_group_completed", None)
            if wait is None:  # the manager of validation and synchronous training
                return manager

            def wait_and_record(*args: Any, **kwargs: Any) -> Any:
                completed, carry_over = wait(*args, **kwargs)
                self._recorded_groups = _groups(completed)
                record(
                    "completed",
                    step=self.global_steps,
                    inputs=[*self._recorded_groups.values()],
                    in_flight=[*_groups(carry_over).values()],
                )
                return completed, carry_over

            manager.enqueue_and_wait_until_group_completed = wait_and_record
            return manager

        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            result = super()._train_step(*args, **kwargs)
            metrics, update = (
                ({}, []) if result is None else (result[0], rows_of_update(result[1], self._recorded_groups))
            )
            resume = {key.removeprefix(METRICS): value for key, value in metrics.items() if key.startswith(METRICS)}
            seconds = time.monotonic() - started
            record("trained", step=self.global_steps, update=update, seconds=seconds, resume=resume)
            return result

        def _save_checkpoint(self) -> Any:
            record("saving", step=self.global_steps)
            result = super()._save_checkpoint()
            record("saved", step=self.global_steps)
            return result

    RecordingTrainer.__name__ = RecordingTrainer.__qualname__ = f"Recording{base.__name__}"
    return RecordingTrainer
