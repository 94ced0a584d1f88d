"""`agentlightning.async_checkpoint`: read from any shape of trainer config, refused with the allowed values named."""

from __future__ import annotations

import re
from typing import Any

import omegaconf
import pytest

from agl_async_ckpt.config import SECTION, AsyncCheckpointConfig, read_config
from agl_async_ckpt.exceptions import ConfigError

OmegaConf = omegaconf.OmegaConf
STRUCT = pytest.mark.parametrize("struct", [True, False], ids=["struct", "open"])


def trainer_config(section: Any = "absent", *, struct: bool = False, **others: Any) -> Any:
    """A config of the trainer's shape."""
    agentlightning: dict[str, Any] = {"async_rollout": {"enabled": True, "async_train_batch_size": 4}}
    if section != "absent":
        agentlightning["async_checkpoint"] = section
    config = OmegaConf.create({"agentlightning": agentlightning, "data": {"seed": 7}, **others})
    OmegaConf.set_struct(config, struct)
    return config


def config_with(path: str, value: Any, *, struct: bool = False) -> Any:
    """A trainer's configuration in which something is set at any place."""
    config = trainer_config()
    OmegaConf.update(config, path, value, force_add=True)
    OmegaConf.set_struct(config, struct)
    return config


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@STRUCT
@pytest.mark.parametrize("section", ["absent", None, {}], ids=["absent", "null", "empty"])
def test_section_left_out_gives_the_defaults(section: Any, struct: bool) -> None:
    """Loaded means on: without the section everything has its default, in struct mode too."""
    assert read_config(trainer_config(section, struct=struct)) == AsyncCheckpointConfig()
    assert AsyncCheckpointConfig().enabled is True
    assert AsyncCheckpointConfig().on_mismatch == "error"


@STRUCT
def test_settings_are_read(struct: bool) -> None:
    """Given values win over the defaults; the rest keeps them."""
    settings = read_config(trainer_config({"enabled": False, "on_mismatch": "reset"}, struct=struct))
    assert settings == AsyncCheckpointConfig(enabled=False, on_mismatch="reset")


def test_config_without_agentlightning_gives_the_defaults() -> None:
    """A trainer of another shape is not the reader's business."""
    assert read_config(OmegaConf.create({})) == AsyncCheckpointConfig()
    assert read_config(OmegaConf.create({"agentlightning": None})) == AsyncCheckpointConfig()


def test_dotlist_overrides_as_in_the_examples_are_read() -> None:
    """Values from a command line arrive as the types that YAML gives them."""
    overrides = OmegaConf.from_dotlist([f"{SECTION}.enabled=false", f"{SECTION}.on_mismatch=reset"])
    settings = read_config(OmegaConf.merge(trainer_config(), overrides))
    assert (settings.enabled, settings.on_mismatch) == (False, "reset")


def test_interpolations_are_resolved() -> None:
    """A setting may point elsewhere in the config."""
    config = trainer_config({"on_mismatch": "${policy}", "enabled": "${agentlightning.async_rollout.enabled}"})
    config.policy = "reset"
    settings = read_config(config)
    assert (settings.enabled, settings.on_mismatch) == (True, "reset")


def test_interpolation_to_nowhere_is_refused() -> None:
    """The message names the setting and what is missing."""
    text = refusal(trainer_config({"on_mismatch": "${policy}"}))
    assert f"{SECTION}.on_mismatch" in text
    assert "policy" in text


@STRUCT
def test_unknown_key_is_refused_with_the_allowed_ones(struct: bool) -> None:
    """All keys are named."""
    text = refusal(trainer_config({"colour": "red"}, struct=struct))
    assert text == f"Unknown key {SECTION}.colour.\nAllowed keys: {', '.join(AsyncCheckpointConfig.model_fields)}."


def test_misspelt_key_is_refused_with_the_likely_one() -> None:
    """A near miss gets a suggestion."""
    assert "Unknown key agentlightning.async_checkpoint.on_mismach. Did you mean on_mismatch?" in refusal(
        trainer_config({"on_mismach": "reset"})
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": "true"}, "enabled is 'true'.\nAllowed values: true, false."),
        ({"enabled": 1}, "enabled is 1.\nAllowed values: true, false."),
        ({"enabled": None}, "enabled is null.\nAllowed values: true, false."),
        ({"enabled": {"a": 1}}, "enabled is {'a': 1}.\nAllowed values: true, false."),
        ({"enabled": "???"}, "enabled is '???'.\nAllowed values: true, false."),
        ({"on_mismatch": "rest"}, "on_mismatch is rest.\nAllowed values: error, reset."),
        ({"on_mismatch": "Reset"}, "on_mismatch is Reset.\nAllowed values: error, reset."),
        ({"on_mismatch": False}, "on_mismatch is false.\nAllowed values: error, reset."),
        ({"in_flight_max_bytes": "10"}, "in_flight_max_bytes is '10'.\nAllowed: a valid integer."),
        ({"in_flight_max_bytes": True}, "in_flight_max_bytes is true.\nAllowed: a valid integer."),
        ({"server_wait_s": -1}, "server_wait_s is -1.\nAllowed: greater than or equal to 0."),
    ],
)
def test_wrong_value_is_refused_with_the_allowed_ones(section: dict[str, Any], message: str) -> None:
    """No guessing: what the config says is shown as it is written there, beside what it may say."""
    assert refusal(trainer_config(section)) == f"{SECTION}.{message}"


def test_several_problems_are_named_at_once() -> None:
    """One start is enough to see them all."""
    text = refusal(trainer_config({"enabled": 2, "on_mismatch": "no", "colour": "red"}))
    assert {f"{SECTION}.enabled", f"{SECTION}.on_mismatch", f"{SECTION}.colour"} <= set(re.findall(r"[\w.]+\w", text))


@pytest.mark.parametrize("section", ["true", True, [1, 2], ""])
def test_section_that_is_no_mapping_is_refused(section: Any) -> None:
    """`agentlightning.async_checkpoint=true` is not a way to switch on."""
    text = refusal(trainer_config(section))
    assert f"{SECTION} must be a mapping of settings" in text
    assert "Allowed keys: enabled, on_mismatch" in text


@pytest.mark.parametrize("key", ["+agentlightning", "++agentlightning"])
def test_key_with_hydra_plus_is_refused(key: str) -> None:
    """A dotlist keeps the plus as part of a new top-level key: the setting would be unused, silently."""
    overrides = OmegaConf.from_dotlist([f"{key}.async_checkpoint.enabled=false"])
    text = refusal(OmegaConf.merge(trainer_config(), overrides))
    assert repr(key) in text
    assert f"Write {SECTION}.<key>=<value> without the leading '+'." in text


@STRUCT
@pytest.mark.parametrize("name", ["async_checkpoints", "async_chekpoint", "async_checkpointing"])
def test_misspelt_section_is_refused(name: str, struct: bool) -> None:
    """A section that nothing reads would be unused, silently."""
    config = trainer_config()
    config.agentlightning[name] = {"enabled": False}
    OmegaConf.set_struct(config, struct)
    assert f"agentlightning.{name}, which nothing reads.\nDid you mean {SECTION}?" in refusal(config)


@STRUCT
@pytest.mark.parametrize(
    "path",
    [
        "async_checkpoint",
        "async_ckpt",
        "agl_async_ckpt",
        "trainer.async_checkpoint",
        "trainer.async_ckpt",
        "agentlightning.async_ckpt",
        "agentlightning.agl_async_checkpoint",
        "agentlightning.async_rollout.async_checkpoint",
        "agentlightning.async_rollout.async_chekpoint",
    ],
)
def test_section_in_another_place_is_refused(path: str, struct: bool) -> None:
    """Wherever a user may think it is, with its full path and the right one."""
    config = config_with(f"{path}.enabled", False, struct=struct)
    assert refusal(config) == f"The config has a section {path}, which nothing reads.\nDid you mean {SECTION}?"


@STRUCT
@pytest.mark.parametrize(
    "path",
    [
        "save_every_minutes",
        "trainer.save_every_minutes",
        "agentlightning.stop_signals",
        "agentlightning.ledger",
        "agentlightning.async_rollout.in_flight",
        "agentlightning.async_rollout.adopt",
    ],
)
def test_setting_outside_of_its_section_is_refused(path: str, struct: bool) -> None:
    """It would be unused, silently: with its path and the right one."""
    config = config_with(path, None, struct=struct)
    name = path.rpartition(".")[2]
    assert refusal(config) == f"The config sets {path}, which nothing reads.\nDid you mean {SECTION}.{name}?"


@pytest.mark.parametrize("path", ["ledger", "trainer.adopt", "enabled", "agentlightning.enabled", "reward.in_flight"])
def test_key_that_may_be_anybodys_is_left_alone(path: str) -> None:
    """Too short a name, or a section that has nothing to do with this one."""
    config = config_with(path, True)
    assert read_config(config) == AsyncCheckpointConfig()


def test_section_in_its_place_and_in_another_is_refused() -> None:
    """One of the two would be unused, silently."""
    config = trainer_config({"enabled": True}, trainer={"async_checkpoint": {"enabled": False}})
    assert "trainer.async_checkpoint" in refusal(config)


def test_own_sections_of_agent_lightning_are_not_taken_for_ours() -> None:
    """The whole config of the installed agent-lightning is accepted."""
    agl_verl = pytest.importorskip("agentlightning.verl")
    from pathlib import Path

    assert read_config(OmegaConf.load(Path(agl_verl.__path__[0], "config.yaml"))) == AsyncCheckpointConfig()


def test_config_is_not_changed_by_reading() -> None:
    """VERL prints and stores the config after us."""
    config = trainer_config({"enabled": True}, struct=True)
    before = OmegaConf.to_container(config, resolve=False)
    read_config(config)
    assert OmegaConf.to_container(config, resolve=False) == before
    assert OmegaConf.is_struct(config)


def test_settings_are_frozen() -> None:
    """What was validated is what holds."""
    with pytest.raises(ValueError, match="frozen"):
        AsyncCheckpointConfig().enabled = False  # type: ignore[misc]


def test_summary_shows_every_setting_as_the_config_writes_it() -> None:
    """The line in the log can be copied into a config."""
    summary = AsyncCheckpointConfig(on_mismatch="reset").summary()
    assert summary.startswith("enabled=true, on_mismatch=reset")
    settings = dict(item.split("=") for item in summary.split(", "))
    assert settings.keys() == AsyncCheckpointConfig.model_fields.keys()
    overrides = OmegaConf.from_dotlist([f"{SECTION}.{key}={value}" for key, value in settings.items()])
    assert read_config(overrides) == AsyncCheckpointConfig(on_mismatch="reset")


@pytest.mark.parametrize("name", list(AsyncCheckpointConfig.model_fields))
def test_every_setting_has_a_description(name: str) -> None:
    """The reference page is made of them."""
    assert AsyncCheckpointConfig.model_fields[name].description


@pytest.mark.parametrize("value", ["SIGTERM", ["SIGKILL"], [15], [["SIGTERM"]], {"SIGTERM": 1}, None, True])
def test_signals_that_cannot_ask_for_a_stop_are_refused_by_name(value: Any) -> None:
    """SIGKILL cannot be handled, and a single name is no list."""
    text = refusal(trainer_config({"stop_signals": value}))
    assert text.startswith(f"{SECTION}.stop_signals is ")
    assert text.endswith("\nAllowed: a list of SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP.")


def test_signals_are_read_from_a_list_without_repetitions() -> None:
    """Also an empty one: the driver handles none."""
    assert read_config(trainer_config({"stop_signals": ["SIGINT", "SIGINT"]})).stop_signals == ("SIGINT",)
    overrides = OmegaConf.from_dotlist([f"{SECTION}.stop_signals=[]", f"{SECTION}.save_every_minutes=30"])
    settings = read_config(OmegaConf.merge(trainer_config(), overrides))
    assert (settings.stop_signals, settings.save_every_minutes) == ((), 30.0)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "15", True])
def test_time_between_saves_is_a_positive_number_of_minutes(value: Any) -> None:
    """Anything else is refused."""
    assert refusal(trainer_config({"save_every_minutes": value})).startswith(f"{SECTION}.save_every_minutes is ")
