"""What the extension relies on in the loop of agent-lightning's trainer, seen in lives of the trainer alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agentlightning.verl import agl_rollout_manager
from agentlightning.verl import trainer as trainer_module

from agl_async_ckpt.agl import internals
from agl_async_ckpt.storage import layout
from tests.contract import agl
from tests.rig.bare import bare_trainer
from tests.rig.life import build_trainer, close_trainer, quiet, run_life, stock_trainer
from tests.rig.runs import settings
from tests.rig.server import AglServer

# --- a life, and who calls whom in it -----------------------------------------------------------------------------


@dataclass
class Seen:
    """What happened in a life of the trainer alone: calls as (caller, callee), and what was asked of the client."""

    calls: set[tuple[str, str]] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


def noting_trainer(seen: Seen) -> type:
    """agent-lightning's trainer; each method that the extension overrides says by which other one it was called."""
    stack = ["somebody else"]

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.calls.add((stack[-1], name))
            stack.append(name)
            try:
                return getattr(stock_trainer(), name)(self, *args, **kwargs)
            finally:
                stack.pop()

        return method

    names = internals.methods_of(internals.Trainer)
    return type("NotingTrainer", (stock_trainer(),), {name: noting(name) for name in names})


@pytest.fixture(scope="module")
def seen(_agl_server: AglServer, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A life that validates, trains, saves and drains."""
    found, out_dir = Seen(), tmp_path_factory.mktemp("life")

    class NotingClient(agl_rollout_manager.AgentLightningSyncClient):
        def __getattribute__(self, name: str) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("agentlightning.verl."):
                found.asked.add(name)
            return super().__getattribute__(name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (agl_rollout_manager, trainer_module):
            patch.setattr(module, "AgentLightningSyncClient", NotingClient)
        run = settings("6/2/3", val_before_train=True)
        run_life(run, out_dir, _agl_server.url, trainer_cls=noting_trainer(found))
    found.files = {path.name for path in out_dir.rglob("*")}
    return found


@pytest.mark.parametrize(
    "call",
    [
        ("fit", "_load_checkpoint"),
        ("fit", "_train_step"),
        ("fit", "_save_checkpoint"),
        ("fit", "_validate"),
        ("_train_step", "_next_train_batch_dict_for_rollout"),
        ("_next_train_batch_dict_for_rollout", "_next_train_batch_dict_with_size"),
        ("_train_step", "_rollout"),
        ("_validate", "_rollout"),
        ("_rollout", "_make_rollout_manager"),
        ("_rollout", "_pause_and_drain_gateway"),
        ("_pause_and_drain_gateway", "_ensure_agl_client"),
    ],
    ids=" calls ".join,
)
def test_overridden_method_is_called_where_expected(call: tuple[str, str], seen: Seen) -> None:
    """An override that nothing calls does nothing."""
    assert call in seen.calls, agl(f"{call[0]} calls self.{call[1]}", "agl/trainer.py")


def test_the_server_is_asked_by_the_known_methods_only(seen: Seen) -> None:
    """A request by another method would not wait for a server that is away."""
    assert seen.asked == {"get", "post_with_retry", "delete"}, agl(
        "calls of the client", "agl/in_flight/server_client.py"
    )


def test_the_trainer_alone_writes_no_file_of_ours(seen: Seen) -> None:
    """A version that does would be a second writer."""
    ours = {layout.FILE_NAME, layout.SEAL_NAME, layout.RUN_FILE_NAME, layout.LOCK_FILE_NAME, layout.LEDGER_NAME}
    assert {layout.TRACKER_NAME, layout.LOADER_FILE_NAME} <= seen.files
    assert not ours & seen.files, agl("these files are the extension's", "agl/internals/process.py")


# --- the loop, with nothing under it ------------------------------------------------------------------------------

LOADED = {"global_steps": 3, "epoch": 1, "_train_dataloader_iter": iter(()), "_carry_over_rollouts": ["in flight"]}
"""What a load puts into the trainer."""
FRESH = {"global_steps": 0, "epoch": 0, "_train_dataloader_iter": None, "_carry_over_rollouts": []}


class Loop:
    """The real `fit` of a run of six steps, and what it does with each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **section: Any) -> None:
        self.notes: list[str] = []
        self.found: list[dict[str, Any]] = []
        monkeypatch.setattr(trainer_module, "Tracking", lambda **_: self)
        monkeypatch.setattr(trainer_module, "compute_timing_metrics", lambda **_: {})
        common = {"project_name": "", "experiment_name": "", "logger": [], "val_before_train": False}
        usual = {"total_epochs": 9, "test_freq": -1, "save_freq": -1}
        config = {"trainer": common | usual | section, "global_profiler": {"steps": None}}
        self.trainer = bare_trainer(
            config,
            total_training_steps=6,
            checkpoint_manager=self,
            resource_pool_manager=self,
            _load_checkpoint=self.load,
            _train_step=self.step,
            _validate=self.validate,
            _save_checkpoint=self.save,
            **dict.fromkeys(FRESH, "of an earlier fit"),
        )

    def fit(self) -> list[str]:
        with quiet():
            self.trainer.fit()
        return self.notes

    def _look(self, what: str) -> None:
        self.notes.append(f"{what} {self.trainer.global_steps}")
        self.found.append({name: getattr(self.trainer, name) for name in FRESH})

    def load(self) -> None:
        self._look("load")
        vars(self.trainer).update(LOADED)

    def step(self, timing_raw: Any, curr_step_profile: bool) -> Any:
        self._look("step")
        return {}, None

    def validate(self) -> dict[str, float]:
        self._look("validate")
        return {"val": 1.0}

    def save(self) -> None:
        self._look("save")

    def log(self, **_: Any) -> None: ...

    def update_weights(self, _: int) -> None: ...

    def get_n_gpus(self) -> int:
        return 0


def test_fit_resets_before_it_loads_and_counts_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load restores stays; the restored epoch is set one lower, as `fit()` adds 1 to it and to the step."""
    loop = Loop(monkeypatch)
    assert loop.fit() == ["load 0", "step 4", "step 5", "step 6"]
    assert loop.found[0] == FRESH, agl("fit() resets before it loads", "agl/resume.py")
    assert loop.found[1] == LOADED | {"global_steps": 4, "epoch": 2}, agl("fit() keeps what is loaded", "agl/resume.py")


def test_buffer_is_reset_neither_by_init_nor_by_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So a restored tail survives `fit()`, and a fresh start has to clear an earlier one."""
    with quiet():
        built = build_trainer(settings("6/2/3"), tmp_path, "http://127.0.0.1:9", trainer_cls=stock_trainer())
    assert internals.buffered_batch(built) is None, agl("no version declares the buffer", "agl/internals/trainer.py")
    close_trainer(built)
    loop = Loop(monkeypatch)
    internals.set_buffered_batch(loop.trainer, {"index": [7]})
    loop.fit()
    assert internals.buffered_batch(loop.trainer) == {"index": [7]}, agl(
        "fit() leaves _train_dataloader_buf alone", "agl/internals/trainer.py"
    )


def test_fit_skips_a_step_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_train_step` returns (metrics, batch), or None: then nothing is validated and nothing saved."""
    loop = Loop(monkeypatch, save_freq=1, test_freq=1)
    own_step = loop.step
    loop.trainer._train_step = lambda *args: own_step(*args) if loop.trainer.global_steps > 4 else None
    assert loop.fit() == ["load 0", *(f"{what} {step}" for step in (5, 6) for what in ("step", "validate", "save"))], (
        agl("fit() goes on after a step without a result", "agl/stop/step_end.py")
    )


def test_fit_saves_by_the_config_as_it_is_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a step can be saved out of turn, or not in its turn; a validation comes before."""
    loop = Loop(monkeypatch, save_freq=5, test_freq=5)
    own_step = loop.step

    def step(*args: Any) -> Any:
        loop.trainer.config.trainer.save_freq = {4: 1, 5: -1, 6: 5}[loop.trainer.global_steps]
        return own_step(*args)

    loop.trainer._train_step = step
    assert loop.fit() == ["load 0", "step 4", "save 4", "step 5", "validate 5", "step 6", "validate 6", "save 6"], agl(
        "fit() reads trainer.save_freq between step and save", "agl/stop/step_end.py"
    )
