"""Prompt groups in flight, at the size of a large run: what the file takes, and how long save, load and resume take.

The rollouts are those of 100-turn agents: per turn a prompt of 16 tokens and an answer with a log-probability for each
of its tokens, in the events that agl-server records, and in its own triplet form beside them. A quarter has finished.
The resume asks a real agl-server, in a process of its own, for all of them: it knows a third of what runs, has lost
the rest, and holds as many again that no checkpoint names.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.figures import Figure, told
from bench.timing import alternate, median, once, peak_memory

NAME = "in_flight"
TITLE = "prompt groups in flight"

N = 8
NUM_TURNS = 100
PROMPT_TOKENS = 16
TOKEN_BYTES = 4 + 4
"""A token id and its log-probability, as 32 bit numbers each: the least that they can take."""


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with tiny sizes, for the figures' form and not for their values."""
    num_groups, num_tokens = (8, 4_000) if quick else (1024, 10**7)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *_shared_inputs(folder / "shared", num_groups),
        _keeping(max(1, num_tokens // (num_groups * N // 4 * NUM_TURNS))),
        *_at_scale(folder / "scale", num_groups, num_tokens),
        *_resume(num_groups),
    ]


def _shared_inputs(folder: Path, num_groups: int) -> list[Figure]:
    """Nothing but requests: inputs of 4 KB, each of which stands in 8 requests and 8 records of the trainer."""
    rng = random.Random(1)
    inputs = [{"prompt": rng.randbytes(2048).hex(), "index": i} for i in range(num_groups)]
    state = _state([_group(i, task) for i, task in enumerate(inputs)])
    from agl_async_ckpt.storage.commit import commit_state

    size = commit_state(state, folder / "global_step_1").stat().st_size
    unique = sum(len(task["prompt"]) for task in inputs)
    return [
        Figure(
            NAME,
            f"file of {num_groups} groups of 8, inputs of 4 KB",
            size / unique,
            "x",
            1.2,
            f"the unique bytes, {told(unique, 'bytes')}",
        )
    ]


def _at_scale(folder: Path, num_groups: int, num_tokens: int) -> list[Figure]:
    from agl_async_ckpt.storage.commit import load_state

    num_finished = num_groups * N // 4
    per_turn = max(1, num_tokens // (num_finished * NUM_TURNS))
    target = folder / "global_step_1"
    peak, save_cpu = _save_groups(target, num_groups, per_turn)
    size = (target / "agentlightning_input.pt").stat().st_size
    load_cpu = once(lambda: load_state(target), time.process_time)
    tokens = num_finished * NUM_TURNS * per_turn
    own = tokens * TOKEN_BYTES
    what = f"{num_groups} x 8, {tokens:.2g} tokens"
    return [
        Figure(NAME, f"save of {what}", save_cpu, "s", None, "CPU time"),
        Figure(NAME, f"load of {what}", load_cpu, "s", None, "CPU time"),
        Figure(
            NAME,
            f"file of {what}",
            size / own,
            "x",
            None,
            f"ids and log-probs as 32 bit numbers, {told(own, 'bytes')}; the events hold both twice",
        ),
        Figure(NAME, f"memory of the save of {what}", float(peak), "bytes", None, "peak, beside the state"),
    ]


def _save_groups(target: Path, num_groups: int, per_turn: int) -> tuple[int, float]:
    """Peak memory and time."""
    from agl_async_ckpt.storage.commit import commit_state

    groups = [
        _group(i, {"prompt": "x" * 4096, "index": i}, finished=N // 4, per_turn=per_turn) for i in range(num_groups)
    ]
    state = _state(groups)
    peak = peak_memory(lambda: commit_state(state, target))
    return peak, once(lambda: commit_state(state, target), time.process_time)


def _state(groups: list[Any]) -> Any:
    from agl_async_ckpt.state import Fingerprint, InputState

    return InputState(1, 1, False, {"position": 1}, None, tuple(groups), None, Fingerprint(), "bench")


def _group(index: int, task: dict[str, Any], *, finished: int = 0, per_turn: int = 0) -> Any:
    from agl_async_ckpt.state import InFlightRollout, PromptGroup

    rng = random.Random(index)  # ids and times hardly compress: they are as random as real ones
    data_id = rng.randbytes(16).hex()
    rollouts: list[Any] = []
    for sibling in range(N):
        rollout_id = rng.randbytes(16).hex()
        enqueued = {
            "data_id": data_id,
            "rollout_id": rollout_id,
            "step": 1,
            "sample_idx_in_step": index,
            "enqueue_time": 1.75e9 + rng.uniform(0, 1e5),
            "input": dict(task),
            "running_at": 1.75e9 + rng.uniform(0, 1e5),
            "finished_at": None,
        }
        request = {"input": dict(task), "is_train": True, "config": None, "metadata": {}}
        kept = _finished(rollout_id, task, per_turn) if sibling < finished else None
        rollouts.append(InFlightRollout(enqueued, request, kept))
    return PromptGroup(data_id, tuple(rollouts))


def _finished(rollout_id: str, task: dict[str, Any], per_turn: int) -> Any:
    """A finished rollout as the trainer keeps it."""
    from agentlightning.schemas import Rollout

    from agl_async_ckpt.agl.in_flight.kept_events import measured

    record = Rollout.model_validate(
        {
            "rollout_id": rollout_id,
            "input": dict(task),
            "is_train": True,
            "config": {},
            "status": {"state": "succeeded", "created_at": 1.75e9, "updated_at": 1.76e9},
        }
    )
    return measured(record, *_events(rollout_id, per_turn))[0]


def _events(rollout_id: str, per_turn: int) -> tuple[list[Any], list[Any]]:
    """Events of a finished rollout, raw and in the triplet form that agl-server's own function makes of them."""
    from agentlightning.schemas import Event
    from agentlightning.server.routes.events import _to_triplet_format

    rng = random.Random(rollout_id)
    raw = [
        Event(
            event_type="model_request",
            rollout_id=rollout_id,
            attempt_id="0",
            timestamp=1.75e9 + turn,
            data=_model_request(rng, per_turn),
        )
        for turn in range(NUM_TURNS)
    ]
    raw.append(Event(event_type="reward", rollout_id=rollout_id, attempt_id="0", timestamp=1.76e9, data={"value": 1.0}))
    return raw, [_to_triplet_format(event) for event in raw]


def _keeping(per_turn: int) -> Figure:
    """What it takes to keep the events of one rollout that has ended, beside what agent-lightning does with them."""
    from agentlightning.schemas import Event

    from agl_async_ckpt.codec.events import PackedEvents

    forms = _events("kept", per_turn)
    texts = [[event.model_dump_json() for event in form] for form in forms]
    dumped = [tuple(event.model_dump(mode="json") for event in form) for form in forms]
    packed = [PackedEvents.pack(form) for form in dumped]
    sides: dict[str, Callable[[], Any]] = {
        "pack": lambda: [PackedEvents.take(form) for form in dumped],
        "read": lambda: [[Event.model_validate_json(text) for text in form] for form in texts],
    }
    seconds = {name: median(times) for name, times in alternate(sides, repeats=5, clock=time.process_time).items()}
    sizes = told(sum(events.num_bytes for events in packed), "bytes"), told(sum(map(_kept_bytes, packed)), "bytes")
    against = f"CPU time; agent-lightning's reading of them {told(seconds['read'], 's')}; {sizes[0]} kept as {sizes[1]}"
    return Figure(NAME, f"packing a rollout of {NUM_TURNS * per_turn} tokens", seconds["pack"], "s", None, against)


def _kept_bytes(events: Any) -> int:
    from agl_async_ckpt.codec.arrays import unpack_bytes

    return len(unpack_bytes(events.encode()["zlib"]))


def _model_request(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    ids = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS + num_tokens)]
    # Inference servers compute log-probabilities in 32 bit and send them as text.
    log_probs = array("f", (-rng.expovariate(2) for _ in range(num_tokens))).tolist()
    return {
        "model": "policy",
        "request": {"messages": [{"role": "user", "content": "go on"}]},
        "response": {
            "prompt_token_ids": ids[:PROMPT_TOKENS],
            "choices": [
                {
                    "token_ids": ids[PROMPT_TOKENS:],
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"logprob": value} for value in log_probs]},
                }
            ],
        },
        "status": "ok",
        "http_status": 200,
    }


def _resume(num_groups: int) -> list[Figure]:
    """Adopt, create again and reclaim, as the first rollout after a resume does."""
    from agl_async_ckpt.agl import internals
    from agl_async_ckpt.agl.in_flight import agl_server
    from agl_async_ckpt.agl.in_flight.carry_over import InFlight
    from agl_async_ckpt.agl.in_flight.keeper import Outcome
    from agl_async_ckpt.agl.in_flight.standing import Policy, fate_at_start
    from bench.server_process import serving

    groups = [_group(i, {"prompt": "x" * 4096, "index": i}) for i in range(num_groups)]
    members = [rollout for group in groups for rollout in group.rollouts]
    with serving() as manager:
        known, foreign = members[: len(members) // 3], len(members) // 3
        for start in range(0, len(known), 256):
            internals.post_rollouts(
                manager, [_creation(rollout.rollout_id, "bench") for rollout in known[start : start + 256]]
            )
        for start in range(0, foreign, 256):
            internals.post_rollouts(
                manager, [_creation(f"left-over-{i}", "bench") for i in range(start, min(start + 256, foreign))]
            )
        in_flight = InFlight(run_id="bench", default_config={})
        policy, outcome = Policy(own_folder=True), Outcome()
        times: dict[str, float] = {}

        def lap(name: str, started: float) -> float:
            times[name] = time.perf_counter() - started
            return time.perf_counter()

        began = at = time.perf_counter()
        in_flight.restore(groups, group_size=N)
        items = in_flight.everything(in_flight.admit([], room=num_groups))
        at = lap("restore", at)
        records = agl_server.list_rollouts(manager.client)
        kept = {item.rollout_id: in_flight.tracked[item.rollout_id].finished for item in items}
        fates = {id: fate_at_start(finished, records.get(id), policy) for id, finished in kept.items()}
        in_flight.settle(fates, doubted=True)
        outcome.take(fates)
        left = [id for id, record in records.items() if id not in kept and in_flight.owns(record)]
        at = lap("list and decide", at)
        agl_server.delete_rollouts(manager.client, left)
        at = lap(f"reclaim {len(left)}", at)
        in_flight.create_missing(items, manager)
        at = lap(f"create {len(outcome.recreated)} again", at)
        total = at - began
        held = agl_server.list_rollouts(manager.client)
    assert len(outcome.adopted) == len(known)
    assert len(left) == foreign
    assert len(held) == len(items) == len(members)
    parts = ", ".join(f"{name} {told(seconds, 's')}" for name, seconds in times.items())
    return [Figure(NAME, f"resume of {len(members)} rollouts with a real agl-server", total, "s", 10.0, parts)]


def _creation(rollout_id: str, run_id: str) -> dict[str, Any]:
    from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY

    return {
        "rollout_id": rollout_id,
        "input": {"prompt": "x" * 4096},
        "is_train": True,
        "metadata": {RUN_ID_KEY: run_id},
    }
