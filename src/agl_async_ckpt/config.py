"""`agentlightning.async_checkpoint` in the trainer config, validated before anything is trained."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from agl_async_ckpt.exceptions import ConfigError, compose

PARENT = "agentlightning"
NAME = "async_checkpoint"
SECTION = f"{PARENT}.{NAME}"

PLACES_TO_ERR = ("", "trainer", PARENT, f"{PARENT}.async_rollout")
NAMES_TO_ERR = (NAME, "async_ckpt", "agl_async_ckpt")
"""Where a user may think the section is, and what it may be called there; close names count too."""

NAMES_OF_OTHERS = ("adopt", "reclaim", "ledger")
"""Settings whose names say too little to be ours outside of the section `agentlightning`."""

STOPPING_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
"""Signals that people and schedulers send to ask for an end; others say that the process is broken."""


class AsyncCheckpointConfig(BaseModel):
    """The settings of the extension. All have defaults: the section may be absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(default=True, description="False leaves every checkpoint to VERL, as if not loaded.")

    on_mismatch: Literal["error", "reset"] = Field(
        default="error",
        description="When a saved position does not fit this run: refuse (`error`), or drop it as a whole (`reset`).",
    )

    in_flight: Literal["keep", "regenerate", "drop"] = Field(
        default="keep",
        description="Of prompts in flight save requests and finished siblings' tokens (`keep`), requests only "
        "(`regenerate`; tokens stay in memory), or nothing (`drop`: they are lost at a resume).",
    )

    in_flight_max_bytes: int = Field(
        default=2**30,
        ge=0,
        description="Bound of the events kept of finished siblings, JSON bytes, in memory and in a checkpoint; beyond "
        "it only the request of a rollout is kept.",
    )

    adopt: Literal["all", "finished_before_death"] = Field(
        default="all",
        description="Rollouts that were still running when the trainer died: adopt them, or run them again.",
    )

    reclaim: bool = Field(
        default=True,
        description="Delete rollouts of this run from the server that the checkpoint does not hold.",
    )

    ledger: bool = Field(
        default=True,
        description="Write which inputs each step pulled, trained, dropped and left in flight to the output folder; "
        "also with `enabled: false`, to measure what resumes lose.",
    )

    lock_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a start waits for another trainer to leave the output folder, seconds.",
    )

    server_wait_s: float = Field(
        default=300.0,
        ge=0,
        description="How long a start, and each request of a running trainer, waits for an agl-server that is away or "
        "answers 5xx, seconds.",
    )

    drain_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="How long a step waits for model requests that were sent to a dead trainer's endpoint, seconds.",
    )

    save_every_minutes: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Save at the end of a step if the last save is this long ago, beside `trainer.save_freq`; null: "
        "not by time.",
    )

    stop_signals: tuple[str, ...] = Field(
        default=("SIGTERM", "SIGUSR1"),
        description="Signals at which a driver in `agl_async_ckpt.run_ppo` has the trainer save and stop; none: the "
        "driver handles no signal.",
    )

    stop_grace_s: float = Field(
        default=1800.0,
        ge=0,
        description="How long a driver waits after such a signal for the trainer to stop, seconds.",
    )

    shield_ray: bool = Field(
        default=False,
        description="Start Ray outside of the driver's process group: a signal to the whole group then does not end it "
        "before the trainer has saved.",
    )

    untested_versions: Literal["warn", "refuse", "allow"] = Field(
        default="warn",
        description="With versions of agent-lightning, VERL or torchdata that the tests do not run on: warn, or refuse "
        "to start; `allow` also starts with those that are known not to work.",
    )

    @field_validator("stop_signals", mode="before")
    @classmethod
    def _signals(cls, names: Any) -> tuple[str, ...]:
        if not isinstance(names, list | tuple) or any(name not in STOPPING_SIGNALS for name in names):
            raise PydanticCustomError("signals", "{allowed}", {"allowed": f"a list of {', '.join(STOPPING_SIGNALS)}"})
        return tuple(dict.fromkeys(names))

    def summary(self) -> str:
        """Return `key=value` pairs for the log, written as in the config."""
        return ", ".join(f"{key}={_as_yaml(value)}" for key, value in self.model_dump().items())


def read_config(config: Any) -> AsyncCheckpointConfig:
    """Read and validate the section of a trainer config.

    Args:
        config: The trainer's OmegaConf config; struct mode on or off, the section present, empty or absent.

    Raises:
        ConfigError: An unknown key, a value that is not allowed, or a section under the wrong name; the message names
            the allowed ones.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_misplaced(config)
    try:
        section = OmegaConf.select(config, SECTION, default=None)
        values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    except OmegaConfBaseException as error:
        raise ConfigError(f"{SECTION} cannot be resolved: {error}") from error
    if values is None:
        return AsyncCheckpointConfig()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{SECTION} must be a mapping of settings, got {values!r}.", act=f"Allowed keys: {_allowed_keys()}."
        )
    try:
        return AsyncCheckpointConfig.model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise _explained([_explain(problem) for problem in error.errors()]) from None


def _refuse_misplaced(config: Any) -> None:
    """Refuse settings in a place that nothing reads: they would be unused silently."""
    from omegaconf import OmegaConf

    for key in config:
        # A dotlist merged without Hydra keeps a leading "+" as part of the key.
        if isinstance(key, str) and key.startswith("+") and key.lstrip("+") == PARENT:
            raise ConfigError(
                f"The config has a top-level key {key!r}, which nothing reads.",
                act=f"Write {SECTION}.<key>=<value> without the leading '+'.",
            )
    for place in PLACES_TO_ERR:
        section = OmegaConf.select(config, place) if place else config
        for key in section if OmegaConf.is_dict(section) else ():
            path = f"{place}.{key}" if place else str(key)
            if path != SECTION and get_close_matches(str(key), NAMES_TO_ERR, cutoff=0.8):
                raise ConfigError(
                    f"The config has a section {path}, which nothing reads.", act=f"Did you mean {SECTION}?"
                )
            if _is_setting(str(key), place):
                raise ConfigError(f"The config sets {path}, which nothing reads.", act=f"Did you mean {SECTION}.{key}?")


def _is_setting(key: str, place: str) -> bool:
    """Tell whether a key is one of our settings, one level or more too high."""
    names = AsyncCheckpointConfig.model_fields
    return key in names and key != "enabled" and (place.startswith(PARENT) or key not in NAMES_OF_OTHERS)


def _allowed_keys() -> str:
    return ", ".join(AsyncCheckpointConfig.model_fields)


def _explained(problems: list[tuple[str, str]]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0][0], act=problems[0][1])
    return ConfigError("\n".join(compose(fact, act=act) for fact, act in problems))


def _explain(problem: Any) -> tuple[str, str]:
    """Say what is wrong with a key, and what is allowed."""
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(key, AsyncCheckpointConfig.model_fields, n=1)
        suggestion = f" Did you mean {close[0]}?" if close else ""
        return f"Unknown key {SECTION}.{key}.{suggestion}", f"Allowed keys: {_allowed_keys()}."
    return f"{SECTION}.{key} is {_as_yaml(problem['input'])}.", _allowed_values(key, problem)


def _allowed_values(key: str, problem: Any) -> str:
    field = AsyncCheckpointConfig.model_fields.get(key)
    annotation = None if field is None else field.annotation
    if annotation is bool:
        return "Allowed values: true, false."
    if get_origin(annotation) is Literal:
        return f"Allowed values: {', '.join(map(_as_yaml, get_args(annotation)))}."
    return f"Allowed: {problem['msg'].removeprefix('Input should be ')}."


def _as_yaml(value: Any) -> str:
    """Write a value as the config would, with a string in quotes where it could be taken for something else."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and value.isidentifier() and value.lower() not in ("true", "false", "null", "yes", "no"):
        return value
    return repr(value)
