"""One life of a trainer in a scene: everything real but the GPU workers, each act noted in a file as it happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.rig.life import assemble
from tests.rig.record import LogRecorder, Recorder
from tests.rig.settings import RunSettings, compose_config, dataset_rows
from tests.rig.standins import CheckpointManager, WorkerGroup
from tests.scenes.chat import PROMPT_OFFSET, ChatServer
from tests.scenes.services import KEY

POLL_S = 0.05
AGENT_OVERRIDES = (
    f"agentlightning.agl_key={KEY}",
    "agentlightning.local.agent_class=tests.scenes.agent:SceneAgent",
    "agentlightning.local.env_map.SCENE_INPUT=input",
)


class Addresses:
    """Stands in for the model servers: one address. Answers for VERL 0.8.0's manager and for 0.7.1's."""

    rollout_replicas = ()

    def __init__(self, address: str) -> None:
        self.server_addresses = (address,)

    def get_addresses(self) -> list[str]:
        """VERL 0.8.0."""
        return list(self.server_addresses)

    def get_replicas(self) -> list[Any]:
        """VERL 0.8.0."""
        return []


def rows_of(batch: Any) -> list[int]:
    """Row ids of a loader batch."""
    return [] if not batch else [int(row) for row in batch["index"]]


def groups_of(rollouts: list[Any]) -> list[int]:
    """Row of each prompt group, in order."""
    return list({rollout.data_id: int(rollout.input["index"]) for rollout in rollouts}.values())


class SceneMixin:
    """Goes in front of a trainer class: notes what it does, and stands in for the calls to GPU workers."""

    recorder: Recorder
    model_address: str
    die_at: tuple[str, int] | None
    hold_at: frozenset[tuple[str, int]]
    gates: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor_rollout_wg = WorkerGroup("actor", lambda role, step: self._at("actor saved", step))
        self.checkpoint_manager = CheckpointManager()
        # VERL 0.8.0 and 0.7.1; agent-lightning takes the first if it is there.
        self.llm_server_manager = self.async_rollout_manager = Addresses(self.model_address)

    def _at(self, point: str, step: int) -> None:
        self.recorder.emit("reached", point=point, step=step)
        if self.die_at == (point, step):
            os.kill(os.getpid(), signal.SIGKILL)
        while (point, step) in self.hold_at and not (self.gates / f"{point} {step}").exists():
            time.sleep(POLL_S)

    def _position(self: Any) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "in_flight": groups_of(self._carry_over_rollouts),
            "rollouts": [rollout.model_dump() for rollout in self._carry_over_rollouts],
            "buffered": rows_of(getattr(self, "_train_dataloader_buf", None)),
        }

    def _load_checkpoint(self: Any) -> Any:
        result = super()._load_checkpoint()  # type: ignore[misc]
        self.recorder.emit("loaded", step=self.global_steps, **self._position())
        self._at("loaded", self.global_steps)
        return result

    def _next_train_batch_dict_for_rollout(self: Any) -> Any:
        batch = super()._next_train_batch_dict_for_rollout()  # type: ignore[misc]
        self.recorder.emit("pulled", step=self.global_steps, rows=rows_of(batch))
        return batch

    def _make_rollout_manager(self: Any, manager_cls: type) -> Any:
        manager = super()._make_rollout_manager(manager_cls)  # type: ignore[misc]
        manager._poll_interval_seconds = POLL_S
        trainer = self
        register, create, get = manager.register_model, manager._create_rollouts, manager._get_rollout
        wait = getattr(manager, "enqueue_and_wait_until_group_completed", None)
        seen: set[str] = set()

        def register_model(addresses: list[str]) -> Any:
            models = register(addresses)
            trainer._at("registered", trainer.global_steps)
            return models

        def enqueue_and_wait(*args: Any, **kwargs: Any) -> Any:
            completed, rest = wait(*args, **kwargs)
            fields = {"events", "triplet_events"}
            trainer.recorder.emit(
                "completed",
                step=trainer.global_steps,
                rows=groups_of(completed),
                rollouts=[rollout.model_dump(mode="json", exclude=fields) for rollout in completed],
            )
            trainer._at("completed", trainer.global_steps)
            return completed, rest

        def create_rollouts(*args: Any, **kwargs: Any) -> Any:
            created = create(*args, **kwargs)
            trainer._at("enqueued", trainer.global_steps)
            return created

        def get_rollout(rollout_id: str) -> Any:
            rollout = get(rollout_id)
            if rollout.rollout_id not in seen and rollout.status.state.value in ("succeeded", "failed"):
                seen.add(rollout.rollout_id)
                trainer.recorder.emit("seen", rollout_id=rollout.rollout_id, state=rollout.status.state.value)
            return rollout

        manager.register_model = register_model
        manager._create_rollouts = create_rollouts
        manager._get_rollout = get_rollout
        if wait is not None:
            manager.enqueue_and_wait_until_group_completed = enqueue_and_wait
        return manager

    def _train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._train_step(*args, **kwargs)  # type: ignore[misc]
        if result is not None:
            kept = ("training/async", "training/n_")
            metrics = {name: float(value) for name, value in result[0].items() if name.startswith(kept)}
            self.recorder.emit("metrics", step=self.global_steps, metrics=metrics)
        return result

    def _save_checkpoint(self: Any) -> None:
        self._at("save", self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]
        self.recorder.emit("saved", step=self.global_steps, **self._position())
        self._at("saved", self.global_steps)

    def _compute_old_log_prob(self, batch: Any) -> Any:
        import torch
        from verl import DataProto

        return DataProto.from_single_dict(
            {"old_log_probs": torch.zeros(batch.batch["responses"].shape, dtype=torch.float32)}
        ), 0.0

    def _update_actor(self: Any, batch: Any) -> Any:
        from verl import DataProto

        data = batch.batch
        masks = data["attention_mask"][:, -data["responses"].shape[1] :].bool()
        self.recorder.emit(
            "updated",
            step=self.global_steps,
            samples=[
                {
                    "rollout_id": str(batch.non_tensor_batch["rollout_id_list"][i]),
                    "row": int(data["prompts"][i, -1]) - PROMPT_OFFSET,
                    "tokens": data["responses"][i][mask].tolist(),
                    "log_probs": data["rollout_log_probs"][i][mask].tolist(),
                    "reward": float(data["token_level_scores"][i].sum()),
                }
                for i, mask in enumerate(masks)
            ],
        )
        self._at("updated", self.global_steps)
        return DataProto.from_single_dict({}, meta_info={"metrics": {}})


def build_trainer(
    settings: RunSettings,
    out_dir: str,
    base_url: str,
    recorder: Recorder,
    *,
    model_address: str,
    die_at: tuple[str, int] | None = None,
    hold_at: frozenset[tuple[str, int]] = frozenset(),
    gates: Path = Path("gates"),
    stock: bool = False,
) -> Any:
    """The trainer as agent-lightning's task runner builds it, with recording and the stand-ins; not yet run."""
    from agentlightning.verl.dataset import LoadedDataset
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin

    config = compose_config(settings, out_dir, base_url)
    rows = dataset_rows(settings)
    bases = (SceneMixin, AgentLightningRayPPOTrainer)
    if not stock:
        bases = (SceneMixin, AsyncCheckpointMixin, AgentLightningRayPPOTrainer)
    values = {
        "recorder": recorder,
        "model_address": model_address,
        "die_at": die_at,
        "hold_at": hold_at,
        "gates": gates,
    }
    cls: Any = type("SceneTrainer", bases, values)
    return assemble(cls, config, LoadedDataset(rows), LoadedDataset(rows[:2]))


def note_posts(recorder: Recorder) -> None:
    """Note every rollout that is posted, once it has gone out on the wire."""
    from agentlightning.client import AgentLightningSyncClient

    send = AgentLightningSyncClient.request

    def request(self: Any, method: str, url: str, **kwargs: Any) -> Any:
        is_creation = (method, url) == ("POST", "/api/rollouts")
        try:
            response = send(self, method, url, **kwargs)
        except httpx.ConnectError:
            raise
        except httpx.TransportError:
            if is_creation:
                recorder.emit("posted", requests=kwargs["json"])
            raise
        if is_creation:
            recorder.emit("posted", requests=kwargs["json"])
        return response

    AgentLightningSyncClient.request = request


def run_life(request: Mapping[str, Any]) -> None:
    """Run the life that `request` describes, to its end or its death.

    Args:
        request: `settings` (JSON of `RunSettings`), `out_dir`, `base_url`, `record` (path of the event file),
            `name`, and optionally `die_at` ([point, step]), `hold_at` (a list of such, see `Stage.start_life`),
            `model_address` (else a chat server of its own) and `pulls_until` (only pull, with the stock trainer, until
            this step).
    """
    recorder = Recorder(Path(request["record"]))
    settings = RunSettings.from_json(request["settings"])
    stock = "pulls_until" in request
    address = request.get("model_address")
    if address is None:
        chat = ChatServer(request["name"])
        chat.serve_in_thread()
        address = chat.address
    note_posts(recorder)
    with LogRecorder(recorder, "agl_async_ckpt"):
        trainer = build_trainer(
            settings,
            request["out_dir"],
            request["base_url"],
            recorder,
            model_address=address,
            die_at=tuple(request["die_at"]) if request.get("die_at") else None,
            hold_at=frozenset((point, step) for point, step in request.get("hold_at") or ()),
            gates=Path(request["record"]).parent / "gates",
            stock=stock,
        )
        if stock:
            pull_only(trainer, recorder, settings, int(request["pulls_until"]))
        else:
            trainer.fit()
    recorder.emit("finished")


def pull_only(trainer: Any, recorder: Recorder, settings: RunSettings, until_step: int) -> None:
    """What the uninterrupted run takes from the loader: A inputs in its first step, B in each later one."""
    trainer.epoch = 1
    for step in range(1, until_step + 1):
        trainer.global_steps = step
        rows = rows_of(trainer._next_train_batch_dict_with_size(settings.A if step == 1 else settings.B))
        recorder.emit("pulled", step=step, rows=rows)
        recorder.emit("saved", step=step, **trainer._position())
