"""Switching on in real Ray: real `run_ppo`, real task runner, real trainer; only workers and training are left out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.switch_on.launch import OBSERVER, PLUGIN_VARIABLE, Outcome, cluster, run_script, write_model
from tests.switch_on.names import ASK_A_WORKER

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # 10 to 20 s each on two idle cores

HOOK = "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
OURS = "agl_async_ckpt.worker.setup"
OWN_HOOK = "tests.switch_on.own_trainer.setup"
PLUGIN = "agl_async_ckpt.plugin"
OVERRIDES = "agl_async_ckpt.agl.trainer.CheckpointOverrides"
AGL_TRAINER = "agentlightning.verl.trainer.AgentLightningRayPPOTrainer"
STOCK = [AGL_TRAINER, "verl.trainer.ppo.ray_trainer.RayPPOTrainer", "builtins.object"]
OWN_TRAINER = [
    "tests.switch_on.own_trainer.OwnTrainer",
    "agl_async_ckpt.agl.trainer.AsyncCheckpointMixin",
    AGL_TRAINER,  # extended when its module was imported
]

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def short_dir() -> Iterator[Path]:
    """A folder with a short path: Ray puts sockets into it."""
    with tempfile.TemporaryDirectory(prefix="agl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def address(short_dir: Path) -> Iterator[str]:
    with cluster(short_dir) as address:
        yield address


@pytest.fixture
def on_cluster(address: str, model: Path, tmp_path: Path) -> Run:
    def run(name: str, *arguments: str, **variables: str) -> Outcome:
        return run_script(
            name, tmp_path / "out", model, f"ray_kwargs.ray_init.address={address}", *arguments, **variables
        )

    return run


def assert_extended(outcome: Outcome, *, first: list[str]) -> None:
    """The trainer that the task runner built carries the overrides once, and one line says so."""
    assert outcome.returncode == 0, outcome.output
    assert outcome.observed is not None
    assert outcome.observed["mro"] == [*first, OVERRIDES, *STOCK]
    assert outcome.observed["is_module_attribute"]


def test_config_line_switches_on_in_unchanged_script(on_cluster: Run) -> None:
    """One override on a script that knows nothing of the extension: trainer extended, losses registered, one line."""
    outcome = on_cluster(
        "train",
        f"{HOOK}={OURS}",
        "agentlightning.async_checkpoint.on_mismatch=reset",
        f"trainer.experiment_name={ASK_A_WORKER}",
    )
    assert_extended(outcome, first=[AGL_TRAINER])
    assert outcome.observed is not None
    assert outcome.observed["active"] is True
    assert "per_rollout_mean" in outcome.observed["worker_losses"]  # agent-lightning's own hook ran in other workers
    assert outcome.observed["nccl_debug"] == "WARN"  # of VERL's own environment for workers
    from agl_async_ckpt import __version__

    [line] = outcome.lines("agl-async-ckpt")
    assert f"agl-async-ckpt {__version__} is active (enabled=true, on_mismatch=reset" in line
    assert "agl_async_ckpt" not in (Path(__file__).parents[1] / "switch_on" / "train.py").read_text()


def test_plugin_variable_in_runtime_env_loads_and_stays_out_of_synchronous_training(on_cluster: Run) -> None:
    """`VERL_USE_EXTERNAL_MODULES` in the job's environment extends the trainer, which then only says that it is."""
    outcome = on_cluster(
        "train",
        f"{ENV_VARS}.{PLUGIN_VARIABLE}='{PLUGIN},{OBSERVER}'",
        "agentlightning.async_rollout.enabled=false",
    )
    assert_extended(outcome, first=[AGL_TRAINER])
    assert outcome.observed is not None
    assert outcome.observed["active"] is False
    [line] = outcome.lines("agl-async-ckpt")
    assert "is loaded; synchronous training keeps VERL's checkpoints as they are" in line


def test_plugin_variable_in_plain_environment_switches_on(short_dir: Path, model: Path, tmp_path: Path) -> None:
    """Exported before a Ray that the script starts itself, the variable reaches the task runner."""
    ray_dir = short_dir / "own"
    ray_dir.mkdir()
    outcome = run_script(
        "train",
        tmp_path / "out",
        model,
        "ray_kwargs.ray_init.num_cpus=1",
        "ray_kwargs.ray_init.include_dashboard=false",
        f"ray_kwargs.ray_init.object_store_memory={100 * 1024**2}",
        RAY_ADDRESS="local",
        RAY_TMPDIR=str(ray_dir),
        **{PLUGIN_VARIABLE: f"{PLUGIN},{OBSERVER}"},
    )
    assert_extended(outcome, first=[AGL_TRAINER])
    assert len(outcome.lines("is active")) == 1


def test_run_ppo_chains_the_hook_of_the_config(on_cluster: Run) -> None:
    """`agl_async_ckpt.run_ppo` runs the user's hook too, which here puts a trainer with the mixin in place."""
    outcome = on_cluster("own_entry", f"{HOOK}={OWN_HOOK}")
    assert_extended(outcome, first=OWN_TRAINER)
    assert outcome.observed is not None
    assert outcome.observed["own_hook_ran"]
    assert outcome.observed["nccl_debug"] == "WARN"  # the variable that names the hook has not displaced VERL's
    assert len(outcome.lines("is active")) == 1


def test_all_ways_at_once_in_initialised_ray_are_harmless(on_cluster: Run) -> None:
    """Own `ray.init` with our hook, plugin variable, `run_ppo`, a trainer with the mixin: overrides once, one line."""
    runtime_env = {
        "worker_process_setup_hook": OURS,
        "env_vars": {PLUGIN_VARIABLE: f"{PLUGIN},{OBSERVER}", "AGL_ASYNC_CKPT_CHAINED_HOOK": OWN_HOOK},
    }
    outcome = on_cluster("own_entry", f"--runtime-env={json.dumps(runtime_env)}", f"{HOOK}={OURS}")
    assert_extended(outcome, first=OWN_TRAINER)
    assert len(outcome.lines("is active")) == 1


def test_run_ppo_refuses_initialised_ray_without_the_extension(on_cluster: Run) -> None:
    """In a Ray whose workers don't load the extension, nothing is trained and the message names the other ways."""
    outcome = on_cluster("own_entry", "--runtime-env={}")
    assert outcome.returncode == 1
    assert outcome.observed is None
    assert outcome.lines("ActivationError: Ray was initialised before run_ppo, without the extension")
    assert outcome.lines('runtime_env={"worker_process_setup_hook": "agl_async_ckpt.worker.setup"}')
    assert outcome.lines("VERL_USE_EXTERNAL_MODULES=agl_async_ckpt.plugin")
