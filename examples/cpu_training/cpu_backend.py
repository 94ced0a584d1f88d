"""What VERL 0.8.0 needs to train on CPU. Each shim says why; none of them is about checkpoints.

Installed in every Ray worker by `worker_hook`, before VERL is imported there: VERL modules are changed when they are
imported, so that a worker which never needs them does not pay for the import.
"""

from __future__ import annotations

from typing import Any

import torch
import wrapt

ROLLOUT_NAME = "tiny_chat"
"""`actor_rollout_ref.rollout.name` of the chat server that stands where vLLM or SGLang would."""


def install() -> None:
    """Install all shims in this process."""
    _hide_cuda()
    _complete_torch_cpu()
    # Two cores are shared by about ten processes: more threads per process only get in each other's way.
    torch.set_num_threads(1)
    wrapt.register_post_import_hook(_use_gloo, "verl.utils.distributed")
    wrapt.register_post_import_hook(_replace_flash_attention, "verl.utils.attention_utils")
    wrapt.register_post_import_hook(_register_fsdp2_for_cpu, "verl.workers.engine.fsdp.transformer_impl")
    wrapt.register_post_import_hook(_register_weight_sync, "verl.workers.rollout.base")
    wrapt.register_post_import_hook(_register_chat_server, "verl.workers.rollout.replica")


def _hide_cuda() -> None:
    """Keep a machine's real GPU out of it.

    VERL asks Ray for a GPU, so Ray is told of one that does not exist; where a GPU does exist the worker would
    find it and mix devices.
    """
    torch.cuda.is_available = lambda: False


def _complete_torch_cpu() -> None:
    """Give `torch.cpu` the allocator functions that VERL calls on whatever device module it runs on."""

    def nothing(*_args: Any, **_kwargs: Any) -> int:
        return 0

    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "empty_cache",
    ):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, nothing)


def _use_gloo(distributed: Any) -> None:
    """Replace VERL's default backend string: for CPU it comes out as `cpu:gloo,cpu:nccl`, which torch refuses."""
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def _replace_flash_attention(attention_utils: Any) -> None:
    """Replace the one flash-attn helper that is needed without kernels, `unpad_input`, by plain torch.

    VERL takes it from flash-attn, which needs a GPU to install; its own copy (for NPU) needs einops, which it does not
    require.
    """

    def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, length, ...) -> tokens (total, ...), their indices (total,), cumulative lengths (batch + 1,)."""
        indices = torch.nonzero(attention_mask.flatten()).flatten()
        lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
        cumulative = torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
        return hidden_states.flatten(0, 1)[indices], indices, cumulative, lengths.max()

    attention_utils.unpad_input = unpad_input


def _register_fsdp2_for_cpu(transformer_impl: Any) -> None:
    """Offer the FSDP2 engine for the device `cpu`; VERL registers it for cuda and npu only, yet it works on gloo."""
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(
        transformer_impl.FSDPEngineWithLMHead
    )


def _register_weight_sync(rollout_base: Any) -> None:
    """Name the class that carries new weights from the trainer to the chat server; it is imported when first used."""
    rollout_base._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "cpu_training.rollout_backend.WeightSync"


def _register_chat_server(replica: Any) -> None:
    """Name the class that launches the chat server; it is imported when first used."""

    def load() -> type:
        from cpu_training.rollout_backend import ChatReplica

        return ChatReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
