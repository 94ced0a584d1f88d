"""torchdata's loader and its states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from agl_async_ckpt.agl.internals.protocols import Trainer
from agl_async_ckpt.exceptions import ActivationError, StateMismatchError

TORCHDATA_STATES = "0.11"
"""The torchdata whose loader states can be converted: both kinds are known by their keys."""

_MAIN_KEYS = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)
"""What a torchdata 0.11 state says about the sampler, with and without workers."""


def loader_state(trainer: Trainer) -> dict[str, Any]:
    """`StatefulDataLoader.state_dict()` of the training loader."""
    return trainer.train_dataloader.state_dict()


def rows_yielded(state: Mapping[str, Any]) -> int | None:
    """Rows of the current pass that the loader has handed out when `state` was taken; None if the state cannot tell.

    torchdata has no public reader for it; the keys are those of its 0.11 states. The sampler's position is noted with
    each batch, so rows that workers have read ahead are not counted.
    """
    main = _main_state(state)
    sampler_state = main["_sampler_iter_state"]
    if sampler_state is None or "samples_yielded" not in sampler_state or state.get("_steps_since_snapshot", 0):
        return None
    return int(sampler_state["samples_yielded"])


def next_rows(trainer: Trainer, state: Mapping[str, Any], num: int) -> list[int] | None:
    """Data set rows that the loader hands out next in its pass, as this torch draws them; None if it cannot be told.

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
    generator_state = _main_state(state)["_sampler_iter_state"]["sampler_iter_state"]["generator"]
    order = _order_in_use(trainer, generator_state)
    if order is not None:
        return order[rows : rows + num]
    generator = torch.Generator()
    generator.set_state(generator_state)
    return torch.randperm(num_rows, generator=generator)[rows : rows + num].tolist()


def _order_in_use(trainer: Trainer, generator_state: Any) -> list[int] | None:
    """The order that the loader's open iterator has drawn from this generator; None if it has none.

    A save would draw it again otherwise, which grows with the data set. torchdata has no public reader for it.
    """
    import torch

    index_iterator = getattr(trainer._train_dataloader_iter, "_sampler_iter", None)  # None before the first pull
    order = getattr(index_iterator, "sampler_iter", None)
    if order is None or not torch.equal(order.generator_state, generator_state):
        return None
    return order.perm


def loaded_loader_state(trainer: Trainer) -> Mapping[str, Any] | None:
    """The loader state that VERL has loaded and that no iterator has taken up yet; None if it has loaded none.

    `state_dict()` would open the iterator, and with it draw from torch's generator.
    """
    return trainer.train_dataloader.next_iter_state


def is_exhausted(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Whether the last batch of the pass was handed out, whether or not StopIteration was seen."""
    loader = trainer.train_dataloader
    rows = rows_yielded(state)
    if state["_iterator_finished"] or rows is None:
        return bool(state["_iterator_finished"])
    return len(loader.sampler) - rows < (loader.batch_size if loader.drop_last else 1)


def pass_has_ended(state: Mapping[str, Any]) -> bool:
    """Whether StopIteration was seen: the loader opens a new pass when this state is loaded."""
    return bool(state["_iterator_finished"])


def obstacle_to_conversion(state: Mapping[str, Any], versions: Iterable[str | None]) -> str | None:
    """Say why a loader state cannot be used with another number of workers or batch size; None if it can.

    Args:
        state: `StatefulDataLoader.state_dict()`.
        versions: Of torchdata: the one that wrote the state, and the one that is to read it.
    """
    for version in versions:
        if version is None or version.split(".")[:2] != TORCHDATA_STATES.split("."):
            return f"the loader state is that of torchdata {version}, and only {TORCHDATA_STATES} is known"
    if rows_yielded(state) is None:
        return "the loader state does not tell how many rows were handed out"
    workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else ()
    own_states = [state.get("dataset_state"), *(worker["dataset_state"] for worker in workers if worker)]
    if any(own_state is not None for own_state in own_states):
        return "the data set has a state of its own in each loader worker"
    return None


def state_for_workers(state: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
    """Return the same position of the same order as the state of a loader with `num_workers` workers.

    Both kinds of state hold the sampler's own; the rest says which worker is next and how they are seeded.
    A position taken without workers has no such seed: a new one is drawn as torch draws it for each pass.
    """
    main = {key: value for key, value in _main_state(state).items() if key in _MAIN_KEYS}
    num_yielded = state["_snapshot"]["_snapshot_step"] if "_snapshot" in state else state["_num_yielded"]
    finished = state["_iterator_finished"]
    if num_workers == 0:
        return copy.deepcopy(
            {
                **main,
                "_num_yielded": num_yielded,
                "fetcher_state": None,
                "dataset_state": None,
                "_iterator_finished": finished,
            }
        )
    base_seed = _main_state(state).get("_base_seed")
    if base_seed is None:
        import torch

        base_seed = torch.empty((), dtype=torch.int64).random_().item()
    snapshot = {
        "_snapshot_step": num_yielded,
        "_last_yielded_worker_id": num_workers - 1,  # the next batch is the first worker's
        "_main_snapshot": {**main, "_num_workers": num_workers, "_base_seed": base_seed},
        "_worker_snapshots": {},  # a worker without a state begins with its copy of the data set as it is
    }
    return copy.deepcopy({"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": finished})


def _main_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state


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
    """The user's sampler and data set where they put a state of their own into that of the loader, by name.

    They can be asked for it: the loader's `state_dict()` would open the iterator, and with it draw an order.
    """
    from torchdata.stateful_dataloader import Stateful

    loader = trainer.train_dataloader
    parts = {"sampler": loader.sampler, "data set": loader.dataset}
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}
