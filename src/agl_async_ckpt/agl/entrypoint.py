"""`run_ppo`: a drop-in for agent-lightning's, with the extension switched on in its Ray workers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.agl import activation, internals
from agl_async_ckpt.agl.activation import CHAINED_HOOK_VARIABLE, PLUGIN, SETUP_HOOK
from agl_async_ckpt.agl.internals import HOOK_KEY, PLUGIN_VARIABLE, RUNTIME_ENV, UPSTREAM_HOOK, ray_store
from agl_async_ckpt.agl.stop.signals import StopSignals, own_process_groups
from agl_async_ckpt.exceptions import ActivationError, StopRequested, TrainingStopped

log = logging.getLogger(__name__)


def run_ppo(config: Any, train_dataset: Sequence[Any], val_dataset: Sequence[Any]) -> None:
    """Train as `agentlightning.verl.entrypoint.run_ppo` does, with exact input checkpoints.

    A worker setup hook that the config already names keeps running, after agent-lightning's own. In the main thread,
    the first of the signals `stop_signals` has the trainer finish its step, save and stop.

    Args:
        config: agent-lightning's trainer config; not changed.
        train_dataset: Non-empty in-memory sequence of inputs.
        val_dataset: The same, for validations.

    Raises:
        ActivationError: Ray is initialised already and its workers have not loaded the extension, or the submitted
            job has a hook, so that ours cannot run. Synchronous training needs no extension and is not refused.
        ConfigError: `agentlightning.async_checkpoint` is not valid; before any process is started.
        StopRequested: A signal, or `agl-async-ckpt stop`, has stopped the training before its last step.
    """
    from agentlightning.verl import entrypoint as upstream

    from agl_async_ckpt.config import read_config

    settings = read_config(config)
    if settings.enabled and config.agentlightning.async_rollout.enabled:
        _require_loadable()
    ensure_visible()
    names = settings.stop_signals if settings.enabled else ()
    with (
        StopSignals(names, ray_store.put_request, grace_s=settings.stop_grace_s) as signals,
        _around_init(signals, apart=settings.enabled and settings.shield_ray),
    ):
        try:
            upstream.run_ppo(with_hook(config), train_dataset, val_dataset)
        except TrainingStopped as error:
            stopped = getattr(error, "cause", error)  # Ray's error around it has the trainer's traceback as its text
            raise _noted(StopRequested(str(stopped), stopped.step, saved=stopped.saved)) from None
        except StopRequested as late:
            raise _noted(late)  # noqa: B904 - the same error


def _noted(stop: StopRequested) -> StopRequested:
    """Say in the log why the process will end, and how: the error itself prints nothing."""
    log.warning("%s Exit code %d unless the caller goes on.", stop, stop.code)
    return stop


@contextmanager
def _around_init(signals: StopSignals, *, apart: bool) -> Iterator[None]:
    """Handle signals again after agent-lightning's `ray.init`, if it is still to come.

    Args:
        signals: The handlers.
        apart: Have Ray's processes start outside of the process group of this one.
    """
    import ray

    if ray.is_initialized():  # its processes are there; a request may be left from an earlier training of this job
        try:
            ray_store.remove_request()
        except Exception as error:  # whatever Ray raises; one that is left stops the training, and is seen in its log
            log.warning("A request to stop of an earlier training may be left in Ray's store (%s).", error)
        yield
        return

    @contextmanager
    def handled() -> Iterator[None]:
        with signals.around_init(), own_process_groups() if apart else nullcontext():
            yield

    with internals.around_ray_init(handled):
        yield


def with_hook(config: Any) -> Any:
    """Return a copy of `config` that names our worker setup hook; one that it named before is chained to ours."""
    from omegaconf import OmegaConf, flag_override

    extended = copy.deepcopy(config)
    own = OmegaConf.select(extended, f"{RUNTIME_ENV}.{HOOK_KEY}", default=None)
    with flag_override(extended, ["struct", "readonly"], False):
        OmegaConf.update(extended, f"{RUNTIME_ENV}.{HOOK_KEY}", SETUP_HOOK, force_add=True)
        if own not in (None, SETUP_HOOK, UPSTREAM_HOOK):
            env_vars = OmegaConf.select(extended, f"{RUNTIME_ENV}.env_vars", default=None)
            if env_vars is None:
                env_vars = internals.worker_environment()
            merged = {**env_vars, CHAINED_HOOK_VARIABLE: str(own)}
            OmegaConf.update(extended, f"{RUNTIME_ENV}.env_vars", merged, force_add=True)
    return extended


def _require_loadable() -> None:
    """Refuse to train where the extension would silently stay out.

    Raises:
        ActivationError: Says how to switch on instead.
    """
    import ray

    if not ray.is_initialized():
        _require_no_job_hook()
    elif not ray.get(ray.remote(num_cpus=0)(_is_loaded).remote()):
        raise ActivationError(
            "Ray was initialised before run_ppo, without the extension: no checkpoint would hold the input position.\n"
            "Switch on in one of these ways:",
            [
                ("let run_ppo initialise Ray", "leave out your own ray.init"),
                ("in your own ray.init", f'runtime_env={{"{HOOK_KEY}": "{SETUP_HOOK}"}}'),
                ("in the environment of Ray's workers", f"{PLUGIN_VARIABLE}={PLUGIN}"),
            ],
        )


def _is_loaded() -> bool:
    """Tell whether the extension is on in this worker process, or comes with its first import of verl."""
    return activation.is_installed() or internals.is_plugin(PLUGIN)


def _require_no_job_hook() -> None:
    # Ray merges the runtime environments of a submitted job and of ray.init, and refuses a field that both set.
    job_hook = internals.hook_of_job()
    if job_hook is None:
        return
    if job_hook == SETUP_HOOK:
        if internals.job_may_be_overridden():
            return
        act = "Take it out of the job's runtime_env: run_ppo sets it."
    else:
        act = (
            f"Take it out of the job's runtime_env and set {RUNTIME_ENV}.{HOOK_KEY}={job_hook} in the trainer config:\n"
            "run_ppo runs it after its own."
        )
    raise ActivationError(
        f"The submitted Ray job sets a {HOOK_KEY}, and Ray refuses the one of run_ppo beside it.",
        [("in the job", job_hook), ("of run_ppo", SETUP_HOOK)],
        act,
    )
