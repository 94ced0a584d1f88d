"""The states of torchdata's `StatefulDataLoader`, as data: what they say, and the same position in another form.

torchdata has no public reader for them. The keys are those of its 0.11 states, of a loader with workers and of one
without; `tests/agl/inputs/test_loader_position.py` holds them against the real loader.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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


def rows_yielded(state: Mapping[str, Any]) -> int | None:
    """Return how many rows of the pass the loader had handed out when `state` was taken; None if the state cannot tell.

    The sampler's position is noted with each batch, so rows that workers have read ahead are not counted.
    """
    try:
        sampler_state = _main_state(state)["_sampler_iter_state"]
        if sampler_state is None or "samples_yielded" not in sampler_state or state.get("_steps_since_snapshot", 0):
            return None
        return int(sampler_state["samples_yielded"])
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version of torchdata
        return None


def order_generator(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the state of the generator that a `RandomSampler` has drawn the order of the pass from."""
    return _main_state(state)["_sampler_iter_state"]["sampler_iter_state"]["generator"]


def pass_has_ended(state: Mapping[str, Any]) -> bool:
    """Tell whether StopIteration was seen: the loader opens a new pass when this state is loaded."""
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
        import torch  # the command that shows a state is set up without

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
