"""Output folders as a run leaves them, made with the package's own writers: real input states, seals, run files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agl_async_ckpt.folder.run_identity import begin_life, note_first_step
from agl_async_ckpt.folder.seal import write_seal
from agl_async_ckpt.state import InFlightRollout, PromptGroup
from agl_async_ckpt.storage.commit import commit_state
from agl_async_ckpt.storage.layout import (
    ALIVE_FILE_NAME,
    FILE_NAME,
    LOADER_FILE_NAME,
    RUN_FILE_NAME,
    SEAL_NAME,
    TRACKER_NAME,
    step_name,
)
from agl_async_ckpt.storage.trailer import Branch
from agl_async_ckpt.storage.writer import TrailerWriter
from tests.golden.sample import objects, small_state
from tests.storage.made import archive, write


def group(data_id: str, step: int, row: dict[str, Any], num_finished: int = 0) -> PromptGroup:
    """A prompt group of two rollouts."""
    from agl_async_ckpt.state import FinishedRollout

    rollouts = tuple(
        InFlightRollout(
            {
                "data_id": data_id,
                "rollout_id": f"{data_id}-{index}",
                "step": step,
                "sample_idx_in_step": index,
                "enqueue_time": 1_700_000_000.0,
                "input": row,
            },
            {"input": row, "is_train": True, "config": {}, "metadata": {}},
            FinishedRollout({"rollout_id": f"{data_id}-{index}"}) if index < num_finished else None,
        )
        for index in range(2)
    )
    return PromptGroup(data_id, rollouts)


def save_step(out: Path, step: int, *, sealed: bool = True, branch: Branch = (), **changes: Any) -> Path:
    """A finished save: input state, model, data.pt, tracker, seal."""
    values: dict[str, Any] = {
        "buffered_batch": {"question": objects("1+1?", "2+2?"), "input_ids": torch.arange(8).reshape(2, 4)},
        "carry_over": (group("data-7", step, {"question": "7+7?", "level": 3}, num_finished=1),),
    }
    folder = out / step_name(step)
    commit_state(small_state(step, **{**values, **changes}), folder, branch=branch)
    plain_save(out, step)
    if sealed:
        write_seal(folder, use_critic=False, async_save=False)
    return folder


def plain_save(out: Path, step: int) -> Path:
    """What VERL alone writes."""
    folder = out / step_name(step)
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "model.pt").write_text("weights")
    (folder / LOADER_FILE_NAME).write_bytes(archive(b"loader state"))
    (out / TRACKER_NAME).write_text(str(step))
    return folder


def make_step(out: Path, step: int) -> Path:
    """Make an unsealed save with actor and critic, whose input file is a small one, made without torch."""
    folder = out / f"global_step_{step}"
    for name in ("actor/model_0.pt", "actor/huggingface/config.json", "critic/model_0.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    write(folder / FILE_NAME)
    (folder / LOADER_FILE_NAME).write_bytes(archive(b"loader state"))
    (out / TRACKER_NAME).write_text(str(step))
    return folder


def begin_run(out: Path, first_step: int) -> None:
    """The run file of a run that has saved since `first_step`."""
    out.mkdir(parents=True, exist_ok=True)
    note_first_step(out, begin_life(out), first_step)


def run_folder(out: Path) -> Path:
    """A sound run with steps 2, 4 and 6; the tracker names 6."""
    begin_run(out, 2)
    for step in (2, 4, 6):
        save_step(out, step)
    return out


def flip(path: Path, at: int) -> None:
    """Alter one bit; from the end if `at` is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def code_in_the_file(out: Path) -> None:
    """An input state that is whole, and asks to run code."""

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("run",)

    path = out / "global_step_6" / FILE_NAME
    from dataclasses import replace

    from agl_async_ckpt.storage.container import read_trailer

    trailer = read_trailer(path)
    content = io.BytesIO()
    torch.save({"x": Evil()}, content)
    with path.open("wb") as file, TrailerWriter(file.fileno()) as writer:
        writer.write(content.getvalue())
        writer.finish(lambda num_bytes: replace(trailer, num_zip_bytes=num_bytes))
    (out / "global_step_6" / SEAL_NAME).unlink()


def _step6(name: str) -> Callable[[Path], Path]:
    return lambda out: out / "global_step_6" / name


STATE, SEAL, LOADER = _step6(FILE_NAME), _step6(SEAL_NAME), _step6(LOADER_FILE_NAME)


def _do(*acts: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        for act in acts:
            act(out)

    return damage


def _tracker(text: str) -> Callable[[Path], Any]:
    return lambda out: (out / TRACKER_NAME).write_text(text)


def _copy_of_step_4(out: Path) -> None:
    shutil.rmtree(out / "global_step_6")
    shutil.copytree(out / "global_step_4", out / "global_step_6")


def _all_incomplete(out: Path) -> None:
    for step in (2, 4, 6):
        (out / step_name(step) / SEAL_NAME).unlink()
    (out / TRACKER_NAME).unlink()


def _background(out: Path) -> None:
    for step in (2, 4, 6):
        write_seal(out / step_name(step), use_critic=False, async_save=True)
    (out / TRACKER_NAME).unlink()


def _plain_run(out: Path) -> None:
    for step in (2, 4, 6):
        (out / step_name(step) / FILE_NAME).unlink()
        (out / step_name(step) / SEAL_NAME).unlink()
    (out / RUN_FILE_NAME).unlink()


def _went_back(step: int, saved: int | None = None) -> Callable[[Path], Any]:
    """A life that began at `step`, 0 for a new training, and has saved step `saved`."""

    def damage(out: Path) -> None:
        begin_life(out, branch=((1, step),))
        if saved is not None:
            save_step(out, saved, branch=((1, step),))

    return damage


def _link_state(target: str) -> Callable[[Path], Any]:
    return _do(lambda out: STATE(out).unlink(), lambda out: STATE(out).symlink_to(target))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda _out: None,
    "tracker_empty": _tracker(""),
    "tracker_torn": _tracker("6x"),
    "tracker_zeroed": _tracker("\0\0"),
    "tracker_missing": lambda out: (out / TRACKER_NAME).unlink(),
    "tracker_names_no_step": _tracker("9"),
    "tracker_names_an_older_step": _tracker("4"),
    "state_truncated": lambda out: STATE(out).write_bytes(STATE(out).read_bytes()[:-9]),
    "state_bit_flipped": lambda out: flip(STATE(out), 200),
    "state_trailer_altered": lambda out: flip(STATE(out), -200),
    "state_empty": lambda out: STATE(out).write_bytes(b""),
    "state_is_a_folder": _do(lambda out: STATE(out).unlink(), lambda out: STATE(out).mkdir()),
    "state_of_agent_lightning": lambda out: shutil.copy(LOADER(out), STATE(out)),
    "state_of_another_step": _copy_of_step_4,
    "state_holds_code": code_in_the_file,
    "state_removed": lambda out: STATE(out).unlink(),
    "state_is_a_link_to_nowhere": _link_state("nowhere"),
    "state_is_a_link_to_itself": _link_state(FILE_NAME),
    "state_and_seal_removed": _do(lambda out: STATE(out).unlink(), lambda out: SEAL(out).unlink()),
    "state_and_seal_of_an_older_step_removed": _do(
        lambda out: (out / "global_step_4" / FILE_NAME).unlink(),
        lambda out: (out / "global_step_4" / SEAL_NAME).unlink(),
    ),
    "seal_removed": lambda out: SEAL(out).unlink(),
    "seal_removed_and_not_selected": _do(lambda out: SEAL(out).unlink(), _tracker("4")),
    "seal_torn": lambda out: SEAL(out).write_text("{"),
    "seal_torn_and_not_selected": _do(lambda out: SEAL(out).write_text("{"), _tracker("4")),
    "seal_of_another_step": lambda out: shutil.copy(out / "global_step_4" / SEAL_NAME, SEAL(out)),
    "loader_file_removed": lambda out: LOADER(out).unlink(),
    "loader_file_truncated": lambda out: LOADER(out).write_bytes(b"PK"),
    "loader_file_bit_flipped": lambda out: flip(LOADER(out), 45),
    "model_of_the_selected_step_pruned": lambda out: shutil.rmtree(out / "global_step_6" / "actor"),
    "model_of_an_older_step_pruned": lambda out: shutil.rmtree(out / "global_step_2" / "actor"),
    "model_file_shortened": lambda out: (out / "global_step_6" / "actor" / "model.pt").write_text("w"),
    "older_step_is_an_empty_shell": _do(
        lambda out: shutil.rmtree(out / "global_step_2" / "actor"),
        lambda out: (out / "global_step_2" / FILE_NAME).unlink(),
        lambda out: (out / "global_step_2" / SEAL_NAME).unlink(),
    ),
    "step_that_was_never_written": lambda out: (out / "global_step_1").mkdir(),
    "no_step_is_proven": _all_incomplete,
    "saved_in_the_background_and_never_published": _background,
    "plain_run": _plain_run,
    "plain_steps_before_the_first_of_ours": lambda out: plain_save(out, 1) and _tracker("6")(out),
    "plain_step_after_the_first_of_ours": lambda out: plain_save(out, 8),
    "run_file_torn": lambda out: (out / RUN_FILE_NAME).write_text("{"),
    "run_file_removed": lambda out: (out / RUN_FILE_NAME).unlink(),
    "proof_of_life_torn": lambda out: (out / ALIVE_FILE_NAME).write_text("{"),
    "leftover_of_a_killed_writer": lambda out: (out / "global_step_6" / f".{FILE_NAME}.123.0123abcd.tmp").write_bytes(
        b"x"
    ),
    "went_back": _went_back(2),
    "went_back_and_saved": _went_back(2, 4),
    "went_back_and_saved_and_tracker_torn": _do(_went_back(2, 4), _tracker("")),
    "went_back_and_lost_the_model": _do(_went_back(2), lambda out: shutil.rmtree(out / "global_step_2" / "actor")),
    "began_anew": _went_back(0),
    "began_anew_and_died_in_the_first_save": _do(
        _went_back(0, 4), lambda out: (out / "global_step_4" / SEAL_NAME).unlink(), _tracker("")
    ),
    "no_steps_left": _do(*(lambda out, n=n: shutil.rmtree(out / step_name(n)) for n in (2, 4, 6))),
    "no_steps_and_no_tracker": _do(
        *(lambda out, n=n: shutil.rmtree(out / step_name(n)) for n in (2, 4, 6)),
        lambda out: (out / TRACKER_NAME).unlink(),
    ),
}
"""What can happen to a sound run folder, by name."""
