"""`run_ppo`: the hook is added to a copy of the config, or the user is told what to do instead. No Ray is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from agl_async_ckpt import worker
from agl_async_ckpt.agl import activation, entrypoint
from agl_async_ckpt.agl.internals import start
from agl_async_ckpt.exceptions import ActivationError, ConfigError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs that agent-lightning's own `run_ppo` was called with; it starts nothing here. Ray is not initialised."""
    from agentlightning.verl import entrypoint as upstream

    configs: list[Any] = []
    monkeypatch.setattr(upstream, "run_ppo", lambda config, train, val: configs.append(config))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for name in (start._JOB_CONFIG_VARIABLE, start._OVERRIDE_JOB_VARIABLE, start.PLUGIN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return configs


def run_config(*dotlist: str) -> Any:
    """A trainer config as far as `run_ppo` reads it, in struct mode."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {
            "agentlightning": {"async_rollout": {"enabled": True}},
            "ray_kwargs": {"ray_init": {"num_cpus": None}},
        }
    )
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(list(dotlist)))
    OmegaConf.set_struct(config, True)
    return config


HOOK = "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"


def runtime_env(config: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env)


def test_run_ppo_adds_the_hook_to_a_copy_of_the_config(started: list[Any]) -> None:
    """What agent-lightning gets differs in the hook only; the caller's config is not touched."""
    from omegaconf import OmegaConf

    config = run_config("ray_kwargs.ray_init.num_cpus=3")
    OmegaConf.set_readonly(config, True)
    before = OmegaConf.to_yaml(config)
    entrypoint.run_ppo(config, [1], [1])
    [given] = started
    assert OmegaConf.to_yaml(config) == before
    assert runtime_env(given) == {"worker_process_setup_hook": worker.SETUP_HOOK}
    assert given.ray_kwargs.ray_init.num_cpus == 3
    assert OmegaConf.is_struct(given)


def test_run_ppo_accepts_a_runtime_env_of_null(started: list[Any]) -> None:
    """As some configs write the absence of one."""
    entrypoint.run_ppo(run_config("ray_kwargs.ray_init.runtime_env=null"), [1], [1])
    assert runtime_env(started[0]) == {"worker_process_setup_hook": worker.SETUP_HOOK}


def test_run_ppo_chains_the_users_hook_and_keeps_verls_environment(started: list[Any]) -> None:
    """agent-lightning drops VERL's environment variables once the config names any; so they are named too."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    entrypoint.run_ppo(run_config(f"{HOOK}=mine.setup"), [1], [1])
    given = runtime_env(started[0])
    assert given["worker_process_setup_hook"] == worker.SETUP_HOOK
    assert given["env_vars"] == {
        **get_ppo_ray_runtime_env()["env_vars"],
        worker.CHAINED_HOOK_VARIABLE: "mine.setup",
    }


def test_run_ppo_keeps_the_environment_that_the_config_names(started: list[Any]) -> None:
    """The user's own variables stay as they are, and only ours is added."""
    entrypoint.run_ppo(run_config(f"{HOOK}=mine.setup", f"{ENV_VARS}.A=b"), [1], [1])
    assert runtime_env(started[0])["env_vars"] == {"A": "b", worker.CHAINED_HOOK_VARIABLE: "mine.setup"}


@pytest.mark.parametrize("own", [worker.SETUP_HOOK, start.UPSTREAM_HOOK])
def test_run_ppo_does_not_chain_what_runs_anyway(started: list[Any], own: str) -> None:
    """Our own hook and agent-lightning's in the config change nothing."""
    entrypoint.run_ppo(run_config(f"{HOOK}={own}"), [1], [1])
    assert runtime_env(started[0]) == {"worker_process_setup_hook": worker.SETUP_HOOK}


def test_run_ppo_refuses_wrong_settings_before_anything_starts(started: list[Any]) -> None:
    """In the driver, in the first second."""
    with pytest.raises(ConfigError, match="Unknown key"):
        entrypoint.run_ppo(run_config("agentlightning.async_checkpoint.colour=red"), [1], [1])
    assert not started


def job_with_hook(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """As Ray starts the entrypoint of a submitted job."""
    job = {"runtime_env": {"worker_process_setup_hook": hook}, "metadata": {}}
    monkeypatch.setenv(start._JOB_CONFIG_VARIABLE, json.dumps(job))


def test_run_ppo_refuses_another_hook_of_the_job_and_says_where_it_goes(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would refuse the two with a message that names neither."""
    job_with_hook(monkeypatch, "mine.setup")
    with pytest.raises(ActivationError) as caught:
        entrypoint.run_ppo(run_config(), [1], [1])
    text = str(caught.value)
    assert "in the job: mine.setup" in text
    assert f"of run_ppo: {worker.SETUP_HOOK}" in text
    assert f"set {HOOK}=mine.setup in the trainer config" in text
    assert not started


def test_run_ppo_refuses_our_hook_in_the_job_too(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses a field that both set, even to the same value; unless it is told to override."""
    job_with_hook(monkeypatch, worker.SETUP_HOOK)
    with pytest.raises(ActivationError, match="Take it out of the job's runtime_env: run_ppo sets it"):
        entrypoint.run_ppo(run_config(), [1], [1])
    monkeypatch.setenv(start._OVERRIDE_JOB_VARIABLE, "1")
    entrypoint.run_ppo(run_config(), [1], [1])
    assert len(started) == 1


@pytest.mark.parametrize("job", ["{}", '{"runtime_env": null}', '{"runtime_env": {"env_vars": {"A": "b"}}}'])
def test_run_ppo_accepts_a_job_without_a_hook(started: list[Any], monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    """Most submitted jobs."""
    monkeypatch.setenv(start._JOB_CONFIG_VARIABLE, job)
    entrypoint.run_ppo(run_config(), [1], [1])
    assert len(started) == 1


@pytest.mark.parametrize(
    "off", ["agentlightning.async_rollout.enabled=false", "agentlightning.async_checkpoint.enabled=false"]
)
def test_run_ppo_does_not_stand_in_the_way_of_what_needs_no_extension(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    """Synchronous training and a disabled extension go to agent-lightning, whatever Ray's state."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    entrypoint.run_ppo(run_config(off), [1], [1])
    assert len(started) == 1


@pytest.mark.parametrize(
    ("variable", "loaded"),
    [
        ("", False),
        ("agl_async_ckpt.plugin", True),
        ("other.module,agl_async_ckpt.plugin", True),
        ("agl_async_ckpt.plugins", False),
    ],
)
def test_worker_knows_whether_the_plugin_comes_with_verl(
    monkeypatch: pytest.MonkeyPatch, variable: str, loaded: bool
) -> None:
    """What `run_ppo` asks a worker of a Ray that was initialised before."""
    monkeypatch.setenv(start.PLUGIN_VARIABLE, variable)
    monkeypatch.setattr(activation, "_installed", False)
    assert entrypoint._is_loaded() is loaded
    monkeypatch.setattr(activation, "_installed", True)
    assert entrypoint._is_loaded()


@pytest.mark.parametrize("shield", [False, True])
def test_ray_starts_out_of_the_process_group_if_asked_for(monkeypatch: pytest.MonkeyPatch, shield: bool) -> None:
    """Only while `ray.init` runs; what the driver itself starts later stays in its group."""
    import ray
    from agentlightning.verl import entrypoint as upstream

    groups: list[bool] = []

    def start(*args: Any) -> None:
        code = "import os; print(os.getpgrp())"
        # As Ray starts its processes.
        done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: None, capture_output=True, check=True)
        groups.append(int(done.stdout) == os.getpgrp())

    def upstream_run_ppo(*args: Any) -> None:
        ray.init()
        start()

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr(upstream, "run_ppo", upstream_run_ppo)
    entrypoint.run_ppo(run_config(f"agentlightning.async_checkpoint.shield_ray={str(shield).lower()}"), [1], [1])
    assert groups == [not shield, True]
    assert ray.init is start


def test_store_that_cannot_be_cleared_ends_no_training(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Ray that was there may hold a request of an earlier training; one line says that it could not be looked at."""

    def broken() -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("agl_async_ckpt.agl.internals.ray_store.remove_request", broken)
    entrypoint.run_ppo(run_config("agentlightning.async_rollout.enabled=false"), [1], [1])
    assert len(started) == 1
    assert "may be left in Ray's store (the store is gone)" in caplog.text
