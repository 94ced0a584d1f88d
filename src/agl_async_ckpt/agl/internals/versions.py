"""Which versions of the frameworks this package was tested with, and what a start does about others.

A name that is overridden and that no longer exists would never be called: the run would train without the extension, or
end at the first poll. So what is missing, or known to work in another way, is refused before a model is built; other
versions are only named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Literal

from agl_async_ckpt.agl.internals.process import written_by
from agl_async_ckpt.agl.internals.protocols import RolloutManager, Trainer, methods_of
from agl_async_ckpt.exceptions import ActivationError

log = logging.getLogger(__name__)

TESTED: Mapping[str, tuple[str, ...]] = {
    "agentlightning": ("1.0.0", "1.0.1", "1.0.2"),
    "verl": ("0.7.1", "0.8.0"),
    "torchdata": ("0.11.0",),
}
"""The versions that the suite runs on, oldest first."""

BATCHED_POLLING = "_get_rollout_statuses"
"""With this method a manager asks for the states of many rollouts at once, past the one that is overridden."""


def require_known_versions(trainer: Trainer, untested: Literal["warn", "refuse", "allow"]) -> None:
    """Refuse what cannot work, and name versions that the suite does not run on.

    Args:
        trainer: Of any class that extends agent-lightning's.
        untested: The setting `untested_versions`: `refuse` turns the warning into an error, `allow` leaves out both.

    Raises:
        ActivationError: With the versions that were tested and those that are installed.
    """
    if untested == "allow":
        return
    from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase

    upstream = [cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] in ("agentlightning", "verl")]
    manager: list[type] = [AglRolloutManagerBase]
    reasons = [
        *(f"its trainer has no {name}" for name in _missing(methods_of(Trainer), upstream)),
        *(f"its rollout manager has no {name}" for name in _missing(methods_of(RolloutManager), manager)),
    ]
    if not _missing([BATCHED_POLLING], manager):
        reasons.append(f"its rollout manager polls in batches ({BATCHED_POLLING})")
    installed = written_by()
    if reasons:
        fact = f"agentlightning {installed['agentlightning']} does not work with this version of agl-async-ckpt."
        raise ActivationError(fact, [("found", reason) for reason in reasons] + _rows(["agentlightning"]), _ACT)
    others = [name for name, tested in TESTED.items() if name in installed and installed[name] not in tested]
    if not others:
        return
    error = ActivationError("agl-async-ckpt was not tested with these versions:", _rows(others), _ACT)
    if untested == "refuse":
        raise error
    log.warning("%s", error)


_ACT = (
    "Install a tested version, or set agentlightning.async_checkpoint.untested_versions=allow to go on without this "
    "check."
)


def _missing(names: Iterable[str], classes: list[type]) -> list[str]:
    return [name for name in names if not any(name in vars(cls) for cls in classes)]


def _rows(packages: list[str]) -> list[tuple[str, object]]:
    installed = written_by()
    return [
        row
        for name in packages
        for row in ((f"{name} here", installed[name]), (f"{name} tested", ", ".join(TESTED[name])))
    ]
