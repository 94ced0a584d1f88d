"""The rollout managers of agent-lightning, extended: requests are noted and tagged, in-flight rollouts settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from agl_async_ckpt import capture
from agl_async_ckpt.carry_over import InFlight


class TaggingClient(wrapt.ObjectProxy):
    """The manager's HTTP client; rollouts that it creates are noted and carry the run id."""

    def __init__(self, wrapped: Any, in_flight: InFlight) -> None:
        super().__init__(wrapped)
        self._self_in_flight = in_flight

    def post_with_retry(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Post as the wrapped client does."""
        if url == capture.ROLLOUTS_URL:
            kwargs["json"] = self._self_in_flight.outgoing(kwargs["json"])
        return self.__wrapped__.post_with_retry(url, *args, **kwargs)


def extended_manager(manager_cls: type, in_flight: InFlight, settle: Callable[[Any], None]) -> type:
    """Return a subclass of a manager class that works for `in_flight`.

    Args:
        manager_cls: Subclass of agent-lightning's `AglRolloutManagerBase`.
        in_flight: Notes what is posted.
        settle: Called with the manager each time its models are registered, before anything is enqueued or awaited.
    """

    class InFlightRolloutManager(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.client = TaggingClient(self.client, in_flight)

        def register_model(self, server_addresses: list[str]) -> Any:
            models = super().register_model(server_addresses)
            settle(self)
            return models

    InFlightRolloutManager.__name__ = manager_cls.__name__
    InFlightRolloutManager.__qualname__ = manager_cls.__qualname__
    return InFlightRolloutManager
