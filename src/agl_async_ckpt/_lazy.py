"""`AsyncCheckpointTrainer` as it is exported: the import of agent-lightning's trainer waits for the first use."""

from __future__ import annotations

from typing import Any

import wrapt


class LazyClass(wrapt.LazyObjectProxy):
    """Stands for a class until it is called, subclassed, looked at or pickled; what is pickled is the class itself."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _same, (self.__wrapped__,)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


def _same(value: Any) -> Any:
    return value


def _load_trainer() -> type:
    from agl_async_ckpt.agl.trainer import AsyncCheckpointTrainer

    return AsyncCheckpointTrainer


AsyncCheckpointTrainer: Any = LazyClass(_load_trainer)
