"""The stand-ins: one Ray actor plays a vLLM engine and a DeepSpeed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch


class CrashError(Exception):
    """The training process ends here, as far as this life is concerned."""


@ray.remote(num_cpus=0)
class Machine:
    """Answers as an engine and trains as a model; keeps which prompts were trained."""

    def begin(self, ckpt: str, crash_at: int | None) -> None:
        """Begin a life: load the checkpoint, as a model actor does when it is built.

        Args:
            ckpt: Folder of the actor's checkpoints.
            crash_at: The training step (counted over all lives) that does not end; None to train to the end.
        """
        self.folder, self.crash_at = Path(ckpt), crash_at
        self.batch: list[str] = []
        self.trained: list[list[str]] = []
        self.generated: list[str] = []
        self.states: dict[str, Any] = {}
        latest = self.folder / "latest"
        if latest.exists():
            self.states = torch.load(self.folder / latest.read_text() / "states.pt", weights_only=False)["client"]
        self.step = self.states.get("global_step", 0)

    def story(self) -> dict[str, Any]:
        """Return what this life trained, step by step, and generated."""
        return {"trained": self.trained, "generated": self.generated}

    # --- vLLM engine

    def get_num_unfinished_requests(self) -> int:
        return 0

    def pause_generation(self) -> None:
        """Partial rollout: called around a weight update."""

    def resume_generation(self) -> None:
        """Partial rollout: called around a weight update."""

    def generate_responses(self, prompt: str, label: str, num_samples: int, **_: Any) -> list[dict[str, Any]]:
        """Answer with tokens that tell prompt and sample; every third prompt is too easy to learn from."""
        self.generated.append(prompt)
        number = int(prompt)
        score = 1.0 if number % 3 == 0 else 0.5
        return [
            {
                "prompt": prompt,
                "label": label,
                "images": None,
                "observation_tokens": [number % 100, *range(2, 4 + number % 3), sample],
                "action_ranges": [(1, 4 + number % 3)],
                "rollout_log_probs": [0.0] + [-0.125 * (number + 1)] * (3 + number % 3),
                "reward": score,
                "scores": score,
                "extra_logs": {"sample": sample},
            }
            for sample in range(num_samples)
        ]

    # --- model of the actor

    def forward(self, sequences: Any, action_mask: Any, **_: Any) -> list[Any]:
        return [torch.zeros(mask.shape) for mask in action_mask]

    def append(self, experience: Any) -> None:
        for item in experience:
            self.batch += item.prompts

    def fit(self, kl_ctl: float = 0.0) -> dict[str, float]:
        self.step += 1
        if self.step == self.crash_at:
            raise CrashError(f"step {self.step}")
        self.trained.append(self.batch)
        self.batch = []
        return {"policy_loss": 0.0}

    def broadcast_to_vllm(self) -> None:
        """No weights to send."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_checkpoint_states(self) -> dict[str, Any]:
        return self.states

    def save_checkpoint(self, tag: str, client_states: Any = None, metric_value: Any = None, metric_key: Any = None):
        """Write as DeepSpeed does: one pickle with the client state in it, then `latest`."""
        folder = self.folder / tag
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"client": client_states}, folder / "states.pt")
        (self.folder / "latest").write_text(tag)


class Group:
    """OpenRLHF's `RayActorGroup` with one rank."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def async_run_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self._machine, method_name).remote(*args, **kwargs)]

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Any]:
        return [getattr(self._machine, method_name).remote(**kwargs)]
