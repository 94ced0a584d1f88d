"""`agentlightning.async_checkpoint` in the trainer config, validated before anything is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_async_ckpt.exceptions import ConfigError

SECTION = "agentlightning.async_checkpoint"


class AsyncCheckpointConfig(BaseModel):
    """The settings of the extension. All have defaults: the section may be absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(default=True, description="False leaves every checkpoint to VERL, as if not loaded.")
    """False leaves every checkpoint to VERL, as if the extension was not loaded."""

    on_mismatch: Literal["error", "reset"] = Field(
        default="error",
        description="When a saved position does not fit this run: refuse (`error`), or drop it as a whole (`reset`).",
    )
    """When a saved position does not fit this run: refuse (`error`), or drop the whole position (`reset`)."""

    def summary(self) -> str:
        """Return `key=value` pairs for the log."""
        return ", ".join(f"{key}={value}" for key, value in self.model_dump().items())


def read_config(config: Any) -> AsyncCheckpointConfig:
    """Read and validate the section of a trainer config.

    Args:
        config: The trainer's OmegaConf config; struct mode on or off, the section present or absent.

    Raises:
        ConfigError: An unknown key, a value that is not allowed, or a section under the wrong key; the message names
            the allowed ones.
    """
    from omegaconf import OmegaConf

    # A dotlist merged without Hydra keeps a leading "+" as part of the key, and the setting is silently unused.
    misplaced = [key for key in config if isinstance(key, str) and key.startswith("+agentlightning")]
    if misplaced:
        raise ConfigError(
            f"The config has a top-level key {misplaced[0]!r}, which nothing reads.\n"
            f"Write {SECTION}.<key>=<value> without the leading '+'."
        )
    section = OmegaConf.select(config, SECTION, default=None)
    if section is None:
        return AsyncCheckpointConfig()
    values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    if not isinstance(values, dict):
        raise ConfigError(f"{SECTION} must be a mapping of settings, got {values!r}.\nAllowed keys: {_allowed_keys()}.")
    try:
        return AsyncCheckpointConfig.model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _allowed_keys() -> str:
    return ", ".join(AsyncCheckpointConfig.model_fields)


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"Unknown key {SECTION}.{key}.\nAllowed keys: {_allowed_keys()}."
    expected = problem.get("ctx", {}).get("expected") or "true, false"
    return f"{SECTION}.{key} is {problem['input']!r}.\nAllowed values: {expected}."
