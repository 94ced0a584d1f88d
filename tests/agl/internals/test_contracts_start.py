"""What switching on relies on: agent-lightning's `run_ppo`, VERL's plugin variable, Ray's runtime environments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from agentlightning.verl import entrypoint as upstream
from omegaconf import OmegaConf

from agl_async_ckpt import worker
from agl_async_ckpt.agl.internals import start
from tests.contract import agl, broken

# --- run_ppo ------------------------------------------------------------------------------------------------------


def started_with(monkeypatch: pytest.MonkeyPatch, *dotlist: str, initialised: bool = False) -> list[dict[str, Any]]:
    """What agent-lightning's `run_ppo` gives to `ray.init`; no Ray is started."""
    import ray

    calls: list[dict[str, Any]] = []
    runner = SimpleNamespace(run=SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(ray, "is_initialized", lambda: initialised)
    monkeypatch.setattr(ray, "init", lambda **settings: calls.append(settings))
    monkeypatch.setattr(ray, "get", lambda _: None)
    monkeypatch.setattr(upstream, "_AglTaskRunner", SimpleNamespace(remote=lambda: runner))
    config = OmegaConf.merge({"ray_kwargs": {"ray_init": {}}}, OmegaConf.from_dotlist(list(dotlist)))
    upstream.run_ppo(config, [{"q": 1}], [{"q": 1}])
    return calls


def test_run_ppo_sets_its_own_hook_unless_the_config_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config's hook replaces agent-lightning's, which ours therefore runs."""
    [stock] = started_with(monkeypatch)
    assert stock["runtime_env"]["worker_process_setup_hook"] == start.UPSTREAM_HOOK, agl(
        f"its worker hook is {start.UPSTREAM_HOOK}", "worker.py"
    )
    [ours] = started_with(monkeypatch, f"{start.RUNTIME_ENV}.worker_process_setup_hook={worker.SETUP_HOOK}")
    assert ours["runtime_env"]["worker_process_setup_hook"] == worker.SETUP_HOOK


def test_run_ppo_drops_verls_environment_if_the_config_names_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why our `run_ppo` repeats it when it has to name a variable."""
    [stock] = started_with(monkeypatch)
    assert "NCCL_DEBUG" in stock["runtime_env"]["env_vars"]
    [named] = started_with(monkeypatch, f"{start.RUNTIME_ENV}.env_vars.A=b")
    assert named["runtime_env"]["env_vars"] == {"A": "b"}, agl(
        "env_vars of the config replace VERL's", "agl/entrypoint.py"
    )


def test_run_ppo_ignores_the_config_in_an_initialised_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why our `run_ppo` asks a worker there."""
    assert started_with(monkeypatch, initialised=True) == []


def test_task_runner_imports_the_trainer_when_it_runs() -> None:
    """By name, from its module, in the worker: that is what the swap waits for."""
    assert start.TRAINER_CLASS not in vars(upstream)
    source = inspect.getsource(upstream)
    assert f"from {start.TRAINER_MODULE} import {start.TRAINER_CLASS}" in source, agl(
        "the task runner imports the trainer class by name", "agl/activation.py"
    )


# --- Ray and VERL -------------------------------------------------------------------------------------------------


def test_ray_names_its_job_variable_as_we_do() -> None:
    """The runtime environment of a submitted job is found there, as JSON."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert RAY_JOB_CONFIG_JSON_ENV_VAR == start._JOB_CONFIG_VARIABLE


def test_ray_refuses_a_hook_of_the_job_beside_ours() -> None:
    """Even the same one, unless told to override; so `run_ppo` says before where the hook goes."""
    from ray.runtime_env import RuntimeEnv
    from ray.runtime_env.runtime_env import _merge_runtime_env

    ours = RuntimeEnv(worker_process_setup_hook=worker.SETUP_HOOK)
    other = RuntimeEnv(worker_process_setup_hook="mine.setup")
    for job in (ours, other):
        assert _merge_runtime_env(job, ours) is None, broken(
            "ray", "a job and ray.init cannot both set a worker hook", used_in="agl/entrypoint.py"
        )
    assert _merge_runtime_env(RuntimeEnv(env_vars={"A": "b"}), ours) is not None
    assert _merge_runtime_env(ours, ours, override=True) == {"worker_process_setup_hook": worker.SETUP_HOOK}
    import ray._private.worker as ray_worker

    assert f'"{start._OVERRIDE_JOB_VARIABLE}"' in inspect.getsource(ray_worker)


def test_run_ppo_initialises_ray_by_the_name_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` is another one for the time of the call; Ray's processes are forked in a way that runs our hook."""
    import ray._private.services as services
    import ray._private.worker as ray_worker

    assert len(started_with(monkeypatch)) == 1, agl("run_ppo calls ray.init", "agl/entrypoint.py")
    source = inspect.getsource(ray_worker.init)
    for text in ("set_sigterm_handler(sigterm_handler)", "sys.exit(signum)"):
        assert text in source, broken(
            "ray", "ray.init ends at a SIGTERM with its number", used_in="agl/stop/signals.py"
        )
    source = inspect.getsource(services.start_ray_process)
    assert "preexec_fn=preexec_fn" in source, broken("ray", "forks with a preexec_fn", used_in="agl/stop/signals.py")
    assert "set_kill_on_parent_death_linux()" in source, broken(
        "ray", "ends with the driver", used_in="agl/stop/signals.py"
    )


def test_store_of_ray_takes_a_value_under_a_key_of_a_namespace() -> None:
    """Asked outside of Ray, there is no request."""
    from ray.experimental import internal_kv

    from agl_async_ckpt.agl.internals import ray_store

    for name, parameters in {
        "_internal_kv_put": {"key", "value", "overwrite", "namespace"},
        "_internal_kv_get": {"key", "namespace"},
        "_internal_kv_del": {"key", "namespace"},
        "_internal_kv_initialized": set(),
    }.items():
        found = set(inspect.signature(getattr(internal_kv, name)).parameters)
        assert parameters <= found, broken("ray", f"{name} takes {parameters}", used_in="agl/internals/ray_store.py")
    assert ray_store.get_request() is None
    ray_store.remove_request()


def test_stop_that_crosses_ray_ends_a_script_that_knows_nothing_of_it() -> None:
    """Ray raises a class made of its own error and ours; Python takes its exit code from the attribute `code`."""
    import pickle

    from ray.exceptions import RayTaskError

    from agl_async_ckpt.exceptions import EXIT_STOPPED, TrainingStopped

    stopped = TrainingStopped("stopped after step 3", 3, True)
    assert not isinstance(stopped, SystemExit), "Ray ends an actor that raises a SystemExit"
    error = pickle.loads(pickle.dumps(RayTaskError("run", "a traceback", stopped, "title", 1, "127.0.0.1")))
    raised = error.as_instanceof_cause()
    assert isinstance(raised, SystemExit), broken(
        "ray", "raises an instance of the cause's class", used_in="exceptions.py"
    )
    assert isinstance(raised, TrainingStopped)
    assert isinstance(raised, RayTaskError)
    assert (raised.code, raised.step, raised.saved) == (EXIT_STOPPED, 3, True)
    assert str(raised.cause) == "stopped after step 3"
    again = pickle.loads(pickle.dumps(stopped))
    assert pickle.loads(pickle.dumps(again)).args == stopped.args


def test_verls_environment_for_workers_is_where_we_take_it_from() -> None:
    """The same function that agent-lightning's `run_ppo` asks."""
    from verl.trainer import constants_ppo, main_ppo

    assert main_ppo.get_ppo_ray_runtime_env is constants_ppo.get_ppo_ray_runtime_env
    assert set(constants_ppo.get_ppo_ray_runtime_env()) >= {"env_vars"}
