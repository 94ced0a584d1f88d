"""What this package leans on inside OpenRLHF, version by version."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.openrlhf import internals
from agl_async_ckpt.openrlhf.generator import PromptStream
from tests.openrlhf.rig.arguments import parse, training_words, version


def source(value: Any) -> str:
    return inspect.getsource(value)


def test_tested_version_is_a_supported_one() -> None:
    """And is the one that the interpreter finds first."""
    assert internals.require_supported() == version()


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("GenerateSamplesActor", {"load_state_dict": ["state_dict"], "fit": ["episode", "total_consumed_prompts"]}),
        ("TrainingActor", {"init_checkpoint_states": [], "fit": ["global_step"]}),
        ("PPOTrainerAsync", {"fit": []}),
    ],
)
def test_actor_has_what_is_overridden(name: str, methods: dict[str, list[str]]) -> None:
    """With the parameters that the overrides take."""
    plain = internals.plain_class(internals.ASYNC_MODULE, name)
    assert inspect.isclass(plain)
    for method, parameters in methods.items():
        found = list(inspect.signature(getattr(plain, method)).parameters)[1:]
        assert [name for name in found if name != "_ray_trace_ctx"] == parameters  # Ray adds that one


def test_trainer_starts_the_actors_by_their_module_names() -> None:
    """And hands the loader's entry of the client state to the generator."""
    text = source(internals.plain_class(internals.ASYNC_MODULE, "PPOTrainerAsync"))
    for part in (
        "GenerateSamplesActor.remote(",
        "TrainingActor.remote(",
        'self.generator_actor.load_state_dict.remote(checkpoint_states["data_loader_state_dict"])',
    ):
        assert part in text


def test_actors_are_called_from_outside_by_the_methods_that_are_forwarded() -> None:
    """By the trainer, and the trainer by the command."""
    calls = re.compile(r"self\.(generator|trainer)_actor\.(\w+)\.remote\(")
    found = calls.findall(source(internals.plain_class(internals.ASYNC_MODULE, "PPOTrainerAsync")))
    assert {name for actor, name in found if actor == "generator"} == set(internals.GENERATOR_METHODS)
    assert {name for actor, name in found if actor == "trainer"} == set(internals.TRAINER_METHODS)
    spec = importlib.util.find_spec(internals.TRAIN_COMMAND)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    assert set(re.findall(r"ppo_trainer\.(\w+)\.remote\(", text)) == set(internals.CONTROLLER_METHODS)


def test_generator_puts_client_states_second_of_four() -> None:
    """Right after it has taken the batch, and an eval result is told apart."""
    text = source(internals.plain_class(internals.ASYNC_MODULE, "GenerateSamplesActor").fit)
    assert "(rollout_samples, client_states, filter_pass_rate, generation_time)" in text
    assert '("eval", global_step, eval_metrics)' in text
    assert text.index(".generate_samples(") < text.index('"data_loader_state_dict": self.prompts_dataloader')
    states = {"episode": 0}
    item = internals.with_client_state((["sample"], states, None, 0.5), lambda found: {**found, "more": 1})
    assert item == (["sample"], {"episode": 0, "more": 1}, None, 0.5)
    for other in ("done", ("eval", 3, {"pass1": 0.5})):
        assert internals.with_client_state(other, lambda _: {}) is other


def test_checkpoints_go_through_the_model_group_with_client_states_by_name() -> None:
    """Regular and best ones."""
    base = internals.plain_class(internals.ASYNC_MODULE, "TrainingActor").__mro__[1]
    for method in (base.save_logs_and_checkpoints, base.save_best_checkpoint):
        text = source(method)
        assert "self.actor_model_group.async_run_method(" in text
        assert 'method_name="save_checkpoint"' in text
        assert "client_states=client_states" in text


def test_samples_generator_keeps_its_iterator_and_buffer_where_they_are_set() -> None:
    """It pulls from the iterator that is there, and makes one only where there is none."""
    generator = internals.samples_generator_class()
    text = source(generator.generate_samples)
    assert 'getattr(self, "_dataloader_iter", None) is None' in text
    assert "dataloader_iter=self._dataloader_iter" in text
    assert "self._sample_buffer[chunk_size:]" in text
    parameters = list(inspect.signature(generator.__init__).parameters)[1:]
    assert parameters == ["strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines"]


def test_only_known_versions_abandon_a_drained_batch() -> None:
    """The fix for them is not applied to others."""
    text = source(internals.samples_generator_class()._generate_vllm)
    assert ("if exhausted and not new_prompts" in text) == (version() in internals._ABANDONS_A_DRAINED_BATCH)


def test_drained_stream_yields_nothing_and_is_not_asked_again() -> None:
    """A loader that has ended may begin anew when it is asked."""
    asked: list[int] = []

    def prompts() -> Any:
        asked.append(1)
        yield from (1, 2)

    stream = PromptStream(prompts())
    assert not stream.drained
    assert list(stream) == [1, 2]
    assert stream.drained
    assert list(stream) == []
    assert asked == [1]
    assert PromptStream(None).drained


def test_experience_fields_are_those_that_were_looked_at() -> None:
    """A new field needs a look at whether it travels exactly."""
    names = "sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values "
    names += "returns advantages kl rewards scores response_length truncated total_length index prompts labels images "
    names += "mm_train_inputs info"
    assert [field.name for field in fields(internals.experience_class())] == names.split()


def test_correction_setting_has_the_name_of_its_version(tmp_path: Path) -> None:
    """Whether samples carry the engine's log-probabilities."""
    args = parse(*training_words(tmp_path, 8))
    assert not internals.needs_rollout_log_probs(args)
    args.algo.advantage.is_correction_level, args.algo.advantage.is_correction_enable = "seq", True
    assert internals.needs_rollout_log_probs(args)


def test_best_checkpoint_needs_prompts_to_evaluate_and_a_metric(tmp_path: Path) -> None:
    """What tells whether a run writes a checkpoint at all."""
    args = parse(*training_words(tmp_path, 2))
    assert (args.eval.dataset, args.ckpt.best_metric_key) == (None, "")
    generator = source(internals.plain_class(internals.ASYNC_MODULE, "GenerateSamplesActor"))
    assert "self.eval_dataloader is not None" in generator
    trainer = Path(inspect.getfile(internals.plain_class(internals.SYNC_MODULE, "PPOTrainer"))).read_text()
    assert 'if self.best_eval_metric_key == "none":' in trainer
    assert "if global_step % self.args.ckpt.save_steps == 0:" in trainer
