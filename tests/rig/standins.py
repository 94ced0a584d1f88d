"""Stand-ins for what needs GPUs or Ray: workers, weight sync, model servers, tokenizer.

Everything else of a run in the rig is the real thing. Each class answers exactly the calls that the trainer makes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def _retention_class() -> type:
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    class Retention(BaseCheckpointManager):
        """VERL's own retention, without the model and the process group that its base wants."""

        def __init__(self) -> None:
            self.previous_saved_paths = []

    return Retention


class WorkerGroup:
    """A worker group with one worker: writes and reads a small "model", with VERL's order and retention.

    Attributes:
        role: `actor` or `critic`.
        on_saved: Called after a save, before the trainer goes on: a place to die.
        loaded_step: The step whose weights were loaded, or None.
    """

    def __init__(self, role: str, on_saved: Callable[[str, int], None] = lambda role, step: None) -> None:
        self.role = role
        self.on_saved = on_saved
        self.loaded_step: int | None = None
        self._dispatch_info = {role: [0]}
        self._retention = _retention_class()()

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None, global_step: int, max_ckpt_to_keep: int | None = None
    ) -> None:
        """As `FSDPCheckpointManager.save_checkpoint`: make room, write, register."""
        self._retention.ensure_checkpoint_capacity(max_ckpt_to_keep)
        folder = Path(local_path)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("model", "optim", "extra_state"):
            text = json.dumps({"role": self.role, "part": part, "step": global_step})
            (folder / f"{part}_world_size_1_rank_0.pt").write_text(text)
        self._retention.register_checkpoint(local_path, max_ckpt_to_keep)
        self.on_saved(self.role, global_step)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        """Read what `save_checkpoint` wrote.

        Raises:
            FileNotFoundError: A file of the model is missing.
        """
        states = [
            json.loads((Path(local_path) / f"{part}_world_size_1_rank_0.pt").read_text())
            for part in ("model", "optim", "extra_state")
        ]
        steps = {state["step"] for state in states}
        assert {state["role"] for state in states} == {self.role}
        assert len(steps) == 1, f"{local_path} mixes steps {steps}"
        (self.loaded_step,) = steps


class CheckpointManager:
    """VERL's weight sync to the rollout replicas; remembers the steps it was called with."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def update_weights(self, global_steps: int) -> None:
        """Push weights: nothing to do."""
        self.updates.append(global_steps)

    def sleep_replicas(self) -> None:
        """Free the replicas' memory: nothing to do."""


class LLMServers:
    """No replica, one address that nobody calls. Answers for VERL 0.8.0's manager and for 0.7.1's."""

    server_addresses = ("127.0.0.1:9",)
    rollout_replicas = ()

    def get_addresses(self) -> list[str]:
        """VERL 0.8.0."""
        return list(self.server_addresses)

    def get_replicas(self) -> list[Any]:
        """VERL 0.8.0."""
        return list(self.rollout_replicas)


class Tokenizer:
    """Decodes for the trajectory tables that agent-lightning builds."""

    pad_token_id = 0
    eos_token_id = 1

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        """One word per token."""
        return " ".join(str(i) for i in ids)


def rich_collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """VERL's `collate_fn` and one column of every kind that the trainer's buffer can split and join."""
    import numpy as np
    import torch
    from verl.utils.dataset.rl_dataset import collate_fn

    ids = [int(row["index"]) for row in rows]
    return {
        **collate_fn(rows),
        "vector": torch.tensor([[i, i + 0.5] for i in ids], dtype=torch.bfloat16),
        "weight": np.asarray([i / 7 for i in ids], dtype=np.float32),
        "count": np.asarray(ids, dtype=np.int16),
        "note": [{"of": i, "parts": [str(i)] * (i % 3), "none": None} for i in ids],
    }
