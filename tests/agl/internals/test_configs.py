"""Values of a config section are overridden for a while, whatever the config allows."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agl_async_ckpt.agl import internals

CONTENT = {"name": "run", "trainer": {"save_freq": 5, "folder": "out/${name}", "keep": None}}


@pytest.fixture(params=["open", "struct", "readonly"])
def config(request: pytest.FixtureRequest) -> Any:
    config = OmegaConf.create(CONTENT)
    OmegaConf.set_struct(config, request.param == "struct")
    OmegaConf.set_readonly(config, request.param == "readonly")
    return config


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_values_are_overridden_until_the_body_ends(config: Any, ends: str) -> None:
    """Also those that the section does not have; an interpolation comes back as one."""
    try:
        with internals.overridden(config.trainer, save_freq=1, folder="elsewhere", keep=None, added=7):
            assert config.trainer == {"save_freq": 1, "folder": "elsewhere", "keep": None, "added": 7}
            if ends != "well":
                raise RuntimeError
    except RuntimeError:
        assert ends != "well"
    assert OmegaConf.to_container(config, resolve=False) == CONTENT


@pytest.mark.parametrize("config", ["struct", "readonly"], indirect=True)
def test_the_section_stays_closed_for_others(config: Any) -> None:
    """Whatever runs in the body finds the config as strict as it was."""
    with internals.overridden(config.trainer, save_freq=1):
        with pytest.raises(OmegaConfBaseException):
            config.trainer.other = 1
        assert "other" not in config.trainer


def test_overrides_may_lie_in_each_other() -> None:
    """A step that is saved out of turn, with the number of models that its save is told."""
    config = OmegaConf.create(CONTENT)
    with internals.overridden(config.trainer, save_freq=1):
        with internals.overridden(config.trainer, save_freq=-1, keep=3):
            assert (config.trainer.save_freq, config.trainer.keep) == (-1, 3)
        assert (config.trainer.save_freq, config.trainer.keep) == (1, None)
    assert config == CONTENT
