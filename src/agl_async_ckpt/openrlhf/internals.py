"""The only module that touches private attributes of OpenRLHF and of Ray.

OpenRLHF has no hook between its generator and its checkpoint, so this leans on names inside it, each with its reason.
`tests/openrlhf/test_contracts.py` fails clearly when a version changes one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import ActivationError

PACKAGE = "openrlhf"
SUPPORTED_VERSIONS = ("0.11.0", "0.11.1", "0.11.2")
TRAIN_COMMAND = "openrlhf.cli.train_ppo_ray"
ASYNC_MODULE = "openrlhf.trainer.ppo_trainer_async"
SYNC_MODULE = "openrlhf.trainer.ppo_trainer"
SAMPLES_MODULE = "openrlhf.trainer.ppo_utils.samples_generator"
EXPERIENCE_MODULE = "openrlhf.trainer.ppo_utils.experience"

# Gives up a whole generation batch when the loader drains while filtered prompts are being replaced.
_ABANDONS_A_DRAINED_BATCH = frozenset({"0.11.0"})
# Renamed `is_correction_enable` to `is_correction_level`.
_HAS_CORRECTION_LEVEL = frozenset({"0.11.2"})


def require_supported() -> str:
    """Return the version of OpenRLHF in this process.

    Raises:
        ActivationError: None is installed, or one whose inner names have not been checked.
    """
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ActivationError(
            "OpenRLHF is not installed here, or its version is not known (a source tree without metadata).",
            act=f"Install one of {supported}.",
        ) from None
    if version not in SUPPORTED_VERSIONS:
        raise ActivationError(
            f"OpenRLHF {version} is not supported; supported are {supported}.",
            act=f"Install one of these, or run `python -m {TRAIN_COMMAND}` without this extension: its checkpoints "
            "then hold no generated samples.",
        )
    return version


GENERATOR_METHODS = ("get_max_steps", "load_state_dict", "fit")
TRAINER_METHODS = ("init_checkpoint_states", "restore_best_checkpoint_state", "broadcast_to_vllm", "fit")
CONTROLLER_METHODS = ("get_max_steps", "fit")
"""What OpenRLHF calls of its actors from other processes."""


# --- classes ------------------------------------------------------------------------------------------------------


def plain_class(module: str, name: str) -> Any:
    """Return the class behind a Ray actor class: `@ray.remote` replaces the module's name by a handle factory, which
    cannot be subclassed.
    """
    return getattr(importlib.import_module(module), name).__ray_actor_class__


def actor_class(module: str, name: str, methods: tuple[str, ...]) -> Any:
    """Return a Ray actor class that builds `module.name` in its own process and forwards `methods` to it.

    Not the class itself: Ray copies inherited methods into the class that it pickles, by value, and a `super()` in one
    of OpenRLHF's would then mean a copy of OpenRLHF's class that ours does not derive from.
    """
    import ray

    class Process:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._inner = getattr(importlib.import_module(module), name)(*args, **kwargs)

    Process.__name__ = Process.__qualname__ = name
    for method in methods:
        setattr(Process, method, _forwarded(method))
    return ray.remote(Process)


def _forwarded(method: str) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, method)(*args, **kwargs)

    forward.__name__ = method
    return forward


def samples_generator_class() -> Any:
    """Return OpenRLHF's `SamplesGenerator`."""
    return importlib.import_module(SAMPLES_MODULE).SamplesGenerator


def experience_class() -> Any:
    """Return OpenRLHF's `Experience`, a dataclass of tensors and lists."""
    return importlib.import_module(EXPERIENCE_MODULE).Experience


def use_actors(*, generator: Any, trainer: Any) -> None:
    """Have `PPOTrainerAsync` in this process start these actors: its constructor names them as globals."""
    module = importlib.import_module(ASYNC_MODULE)
    module.GenerateSamplesActor, module.TrainingActor = generator, trainer  # pyright: ignore[reportAttributeAccessIssue]


# --- the samples generator ----------------------------------------------------------------------------------------


def buffered_samples(generator: Any) -> list[Any]:
    """Return the samples generated and not yet handed out; there is no public view of them."""
    return generator._sample_buffer


def set_buffered_samples(generator: Any, samples: list[Any]) -> None:
    """Put them back, before the first call of `generate_samples` would make an empty list."""
    generator._sample_buffer = samples


def set_prompt_stream(generator: Any, stream: Iterator[Any]) -> None:
    """Have `generate_samples` pull from `stream`; it makes an iterator of its own only where there is none."""
    generator._dataloader_iter = stream


def keep_drained_batches(stream_type: type) -> None:
    """Make a version that abandons accepted samples keep them, when a replacement finds the loader drained.

    That version takes "no prompt, and drained" as a reason to give up the batch, and "no prompt" alone as one to go
    on. Only for streams of `stream_type`, which know themselves whether they are drained. Idempotent.
    """
    if require_supported() not in _ABANDONS_A_DRAINED_BATCH:
        return
    module: Any = importlib.import_module(SAMPLES_MODULE)
    original: Callable[..., tuple[list[Any], list[Any], list[Any], bool]] = module._collect_prompt_batch
    if getattr(original, "__wrapped__", None) is not None:
        return

    def collect(stream: Any, num_prompts: int) -> tuple[list[Any], list[Any], list[Any], bool]:
        prompts, labels, images, drained = original(stream, num_prompts)
        return prompts, labels, images, drained and (bool(prompts) or not isinstance(stream, stream_type))

    collect.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    module._collect_prompt_batch = collect


# --- what travels through the queue, and settings -----------------------------------------------------------------


def with_client_state(item: Any, extend: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Replace the client state in a queued batch of rollouts; an eval result and the end mark pass unchanged.

    A batch is the tuple (samples, client states, pass rate, seconds); an eval result starts with the text "eval".
    """
    if isinstance(item, tuple) and len(item) == 4 and isinstance(item[1], dict):
        samples, client_states, pass_rate, seconds = item
        return samples, extend(client_states), pass_rate, seconds
    return item


def actor_checkpoint(args: Any) -> Path:
    """Return the folder in which the training actor writes and finds its checkpoints."""
    return Path(args.ckpt.path) / "_actor"


def needs_rollout_log_probs(args: Any) -> bool:
    """Tell whether samples must carry the log-probabilities of the engine."""
    advantage = args.algo.advantage
    if require_supported() in _HAS_CORRECTION_LEVEL:
        return advantage.is_correction_level != "off"
    return bool(advantage.is_correction_enable)


def root_cause(error: BaseException) -> BaseException:
    """Return what was raised in the innermost actor: Ray wraps an error once per actor it passes through."""
    cause = getattr(error, "cause", None)
    return root_cause(cause) if isinstance(cause, BaseException) else error
