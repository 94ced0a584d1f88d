"""torchdata's loader in a trainer; what its states say is read in `codec.loader_state`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from agl_async_ckpt.agl.internals.protocols import Trainer
from agl_async_ckpt.codec.loader_state import order_generator, pass_has_ended, rows_yielded, state_for_workers
from agl_async_ckpt.exceptions import ActivationError, StateMismatchError
from agl_async_ckpt.state import Batch


def loader_state(trainer: Trainer) -> dict[str, Any]:
    """Return `StatefulDataLoader.state_dict()` of the training loader."""
    return trainer.train_dataloader.state_dict()


def draws_each_row_once(sampler: Any, num_rows: int) -> bool:
    """Tell whether a pass of a sampler draws each of the `num_rows` rows of the data set once, as its class shows.

    Of a sampler of a user's own nothing is known.
    """
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader.sampler import RandomSampler

    if len(sampler) != num_rows:
        return False
    return type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)


def next_rows(trainer: Trainer, state: Mapping[str, Any], num: int) -> list[int] | None:
    """Tell which rows the loader hands out next in its pass, as this torch draws them; None if that is unknown.

    A state holds the generator and not the order: another torch could draw another order from it.

    Args:
        trainer: With the loader that `state` is of, or is to be loaded into.
        state: `StatefulDataLoader.state_dict()`.
        num: How many at most.
    """
    import torch
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler, rows = trainer.train_dataloader.sampler, rows_yielded(state)
    if rows is None or pass_has_ended(state):
        return None
    num_rows = len(sampler)
    if type(sampler) is SequentialSampler:
        return list(range(rows, min(rows + num, num_rows)))
    if type(sampler) is not RandomSampler or sampler.replacement or num_rows != len(sampler.data_source):  # pyright: ignore[reportArgumentType]
        return None
    generator_state = order_generator(state)
    order = _order_in_use(trainer, generator_state)
    if order is not None:
        return order[rows : rows + num]
    generator = torch.Generator()
    generator.set_state(generator_state)
    return torch.randperm(num_rows, generator=generator)[rows : rows + num].tolist()


def _order_in_use(trainer: Trainer, generator_state: Any) -> list[int] | None:
    """Return the order that the loader's open iterator has drawn from this generator; None if it has none.

    A save would draw it again otherwise, which grows with the data set. torchdata has no public reader for it.
    """
    import torch

    index_iterator = getattr(trainer._train_dataloader_iter, "_sampler_iter", None)  # None before the first pull
    order = getattr(index_iterator, "sampler_iter", None)
    if order is None or not torch.equal(order.generator_state, generator_state):
        return None
    return order.perm


def loaded_loader_state(trainer: Trainer) -> Mapping[str, Any] | None:
    """Return the loader state that VERL has loaded and no iterator has taken up yet; None if it has loaded none.

    `state_dict()` would open the iterator, and with it draw from torch's generator.
    """
    return trainer.train_dataloader.next_iter_state


def is_exhausted(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Tell whether the last batch of the pass was handed out, whether or not StopIteration was seen."""
    loader = trainer.train_dataloader
    rows = rows_yielded(state)
    if state["_iterator_finished"] or rows is None:
        return bool(state["_iterator_finished"])
    return len(loader.sampler) - rows < (loader.batch_size if loader.drop_last else 1)


def restore_loader(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put the loader at a saved position and open its iterator there.

    Opening it at once makes torchdata refuse a state that does not fit here, before the first step, and keeps its
    draws from torch's generator ahead of the generator's own restore.

    Raises:
        StateMismatchError: torchdata refuses the state.
    """
    loader = trainer.train_dataloader
    loader.load_state_dict(copy.deepcopy(dict(state)))
    try:
        trainer._train_dataloader_iter = iter(loader)  # what the trainer's own pull does when it is None
    except (AssertionError, KeyError, StopIteration) as error:
        raise StateMismatchError(
            "The saved loader state does not fit this run's loader.",
            [("torchdata says", error or type(error).__name__), ("workers in this run", loader.num_workers)],
            "Resume with the settings of the saved run.",
        ) from error


def read_ahead(trainer: Trainer, state: Mapping[str, Any], num: int) -> tuple[Batch, dict[str, Any]]:
    """Read the next rows as one batch with a loader of their own; return them and the state behind them."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = trainer.train_dataloader
    reader: Any = StatefulDataLoader(
        loader.dataset, batch_size=num, sampler=loader.sampler, collate_fn=loader.collate_fn
    )
    reader.load_state_dict(state_for_workers(state, 0))
    batch = next(iter(reader))
    return batch, reader.state_dict()


def reset_loader(trainer: Trainer) -> None:
    """Let the next pull begin a new pass at its first row, whatever was loaded before.

    `load_state_dict({})` drops the iterator but keeps a state that waits in `next_iter_state`.
    """
    trainer.train_dataloader.load_state_dict({})
    trainer.train_dataloader.next_iter_state = None
    trainer._train_dataloader_iter = None


def require_stateful_sampler(trainer: Trainer) -> None:
    """Refuse a sampler whose order cannot be put back.

    torchdata saves the state of a sampler (or of its iterator) that has `state_dict`; any other it fast-forwards
    silently, which is exact for a sequential order only. `iter(sampler)` is no way to look: it draws a permutation.

    Raises:
        ActivationError: Names the class.
    """
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader import Stateful
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler = trainer.train_dataloader.sampler
    exact = (RandomSampler, SequentialSampler)
    inherits_iteration = any(isinstance(sampler, cls) and type(sampler).__iter__ is cls.__iter__ for cls in exact)
    if isinstance(sampler, Stateful) or inherits_iteration:
        return
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    raise ActivationError(
        f"The training sampler {name} has no state: after a resume it would continue in another order.",
        act="Give it state_dict() and load_state_dict(), or set agentlightning.async_checkpoint.enabled=false.",
    )


def stateful_parts(trainer: Trainer) -> dict[str, Any]:
    """Return the user's sampler and data set where they put a state of their own into the loader's, by name.

    They can be asked for it: the loader's `state_dict()` would open the iterator, and with it draw an order.
    """
    from torchdata.stateful_dataloader import Stateful

    loader = trainer.train_dataloader
    parts = {"sampler": loader.sampler, "data set": loader.dataset}
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}
