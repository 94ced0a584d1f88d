"""A step's input state is published whole or not at all, and read only when it is sound."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_async_ckpt.codec import input_state as state_codec
from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.codec.packed_json import pack_tree, unpack_tree
from agl_async_ckpt.exceptions import (
    CheckpointNotFoundError,
    DamagedStateError,
    ForeignFormatError,
    StateFormatError,
    StateMismatchError,
    StateWriteError,
    UnencodableValueError,
    UnsupportedVersionError,
)
from agl_async_ckpt.storage import commit as storage
from agl_async_ckpt.storage import files, trailer, writer
from agl_async_ckpt.storage.commit import commit_state, load_state
from agl_async_ckpt.storage.container import read_trailer, verify
from agl_async_ckpt.storage.files import remove_leftover_temps
from agl_async_ckpt.storage.layout import FILE_NAME
from tests.golden.sample import NUMPY_1, NUMPY_2, assert_same, sample_state, small_state


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    return tmp_path / "out" / "global_step_3"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def publish_payload(path: Path, payload: Any, **changes: Any) -> Path:
    """Write any payload under a trailer that fits `small_state`, as the real writer would."""
    state = small_state(**changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, writer.TrailerWriter(file.fileno()) as sink:
        torch.save(payload, sink)
        sink.finish(lambda size: storage._make_trailer(state, size))
    return path


def test_state_comes_back_exactly(step_dir: Path) -> None:
    """Every part of the state survives, from the folder and from the file; the folders are created."""
    state = sample_state()
    path = commit_state(state, step_dir)
    assert path == step_dir / FILE_NAME
    assert names(step_dir) == [FILE_NAME]
    assert_same(load_state(step_dir), state)
    assert_same(load_state(f"{path}"), state)
    assert_same(load_state(f"{step_dir}/"), state)


def test_trailer_agrees_with_the_state(step_dir: Path) -> None:
    """What `inspect` shows without unpickling is what is inside."""
    state = sample_state()
    found = verify(commit_state(state, step_dir))
    assert (found.global_step, found.epoch, found.exhausted) == (3, 2, False)
    assert (found.run_id, found.parent_run_id) == ("run-1", "run-0")
    assert dict(found.counts) == state.counts
    assert dict(found.written_by) == dict(state.written_by)


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_opens_the_file(step_dir: Path, mmap: bool) -> None:
    """The file is a normal torch file, weights_only, with memory mapping and without."""
    payload = torch.load(commit_state(sample_state(), step_dir), weights_only=True, mmap=mmap)
    assert {"global_step", "loader_state", "buffered_batch", "carry_over"} <= payload.keys()


def test_tail_of_a_large_batch_makes_a_small_file(step_dir: Path) -> None:
    """One row of 512 x 4096 int64 takes tens of KB, not 16 MB."""
    batch = {"input_ids": torch.zeros(512, 4096, dtype=torch.int64)[:1]}
    path = commit_state(small_state(buffered_batch=batch), step_dir)
    assert path.stat().st_size < 50_000


def test_large_tensor_is_written_in_blocks(step_dir: Path) -> None:
    """Larger than the writer's block, and not a multiple of it."""
    batch = {"x": torch.arange(10 * 2**20 + 3, dtype=torch.int32).reshape(1, -1)}
    commit_state(small_state(buffered_batch=batch), step_dir)
    assert_same(load_state(step_dir).buffered_batch, batch)


def test_any_altered_byte_or_cut_is_found_before_unpickling(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real file, at places all over it; torch.load is never reached."""
    path = commit_state(sample_state(), step_dir)
    whole = path.read_bytes()

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", forbidden)
    for at in [*range(0, len(whole), 97), *range(len(whole) - 500, len(whole))]:
        altered = bytearray(whole)
        altered[at] ^= 0x10
        path.write_bytes(altered)
        with pytest.raises(DamagedStateError):
            load_state(step_dir)
        path.write_bytes(whole[:at])
        with pytest.raises(DamagedStateError):
            load_state(step_dir)


@pytest.mark.parametrize("file", [NUMPY_1, NUMPY_2], ids=["numpy 1", "numpy 2"])
def test_golden_file_loads(file: Path) -> None:
    """Files that were written once, under numpy 1 and numpy 2, hold the sample state for ever."""
    assert_same(load_state(file), sample_state())


def test_golden_files_are_of_the_current_version() -> None:
    """A new format version comes with files of its own."""
    assert set(NUMPY_1.parent.glob("*.pt")) == {NUMPY_1, NUMPY_2}


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_other_version_is_refused_by_both_numbers(
    step_dir: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A file from an older package, and from a newer one."""
    with monkeypatch.context() as patch:
        for module in (trailer, storage):
            patch.setattr(module, "FORMAT_VERSION", version)
        path = commit_state(small_state(), step_dir)
    with pytest.raises(UnsupportedVersionError) as caught:
        load_state(path)
    this = f"this agl-async-ckpt reads version {FORMAT_VERSION}."
    assert caught.value.fact == f"{path} is of format version {version}; {this}"


def test_unknown_extra_keys_are_ignored(step_dir: Path) -> None:
    """At the top and inside."""
    payload = state_codec.encode_state(sample_state())
    payload["novelty"] = [1]
    payload["fingerprint"]["novelty"] = {"a": torch.ones(1)}
    tree = unpack_tree(payload["carry_over"])
    tree[0]["novelty"] = {"a": torch.ones(1)}
    tree[0]["rollouts"][1]["finished"]["novelty"] = None
    payload["carry_over"] = {**pack_tree(tree), "novelty": 1}
    assert_same(state_codec.decode_state(payload), sample_state())


def test_whole_torch_file_of_another_writer_is_foreign(step_dir: Path) -> None:
    """Not "damaged"."""
    step_dir.mkdir(parents=True)
    torch.save({"input": 1}, step_dir / FILE_NAME)
    with pytest.raises(ForeignFormatError, match="another format"):
        load_state(step_dir)


def test_missing_file_is_not_found(step_dir: Path) -> None:
    """With the path that was looked at."""
    step_dir.mkdir(parents=True)
    for path in (step_dir, step_dir / FILE_NAME, step_dir.parent / "none"):
        with pytest.raises(CheckpointNotFoundError, match=str(path)):
            load_state(path)


def test_folder_in_place_of_the_file_is_named(step_dir: Path) -> None:
    """For reading and for writing."""
    (step_dir / FILE_NAME).mkdir(parents=True)
    with pytest.raises(DamagedStateError, match="a directory"):
        load_state(step_dir)
    with pytest.raises(StateWriteError, match="directory"):
        commit_state(small_state(), step_dir)
    assert names(step_dir) == [FILE_NAME]


def test_state_of_another_step_is_refused(step_dir: Path) -> None:
    """At the save and at the load, with both numbers; a file outside a step folder has none to compare."""
    with pytest.raises(StateMismatchError, match=r"(?s)global_step 4.*global_step_3"):
        commit_state(small_state(4), step_dir)
    with pytest.raises(StateMismatchError, match="elsewhere"):
        commit_state(small_state(4), step_dir.parent / "elsewhere")
    assert not step_dir.parent.exists()
    commit_state(small_state(3), step_dir)
    moved = step_dir.rename(step_dir.parent / "global_step_5")
    with pytest.raises(StateMismatchError, match=r"(?s)global_step 3.*global_step 5"):
        load_state(moved)
    assert load_state((moved / FILE_NAME).rename(step_dir.parent / "copy.pt")).global_step == 3


@pytest.mark.parametrize(
    "changes",
    [{"global_step": 4}, {"run_id": "other"}, {"epoch": 9}, {"exhausted": True}, {"buffered_batch": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_content_that_disagrees_with_the_trailer_is_damage(step_dir: Path, changes: dict[str, Any]) -> None:
    """The two must be of one state."""
    payload = {**state_codec.encode_state(small_state()), **changes}
    with pytest.raises(DamagedStateError, match="disagree"):
        load_state(publish_payload(step_dir / FILE_NAME, payload))


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("echo evil",))


@pytest.mark.parametrize(
    "payload",
    [Evil(), [], {}, {"format_version": "1"}, {"format_version": 1}, {"format_version": 0}, {"format_version": True}],
    ids=["code", "list", "empty", "version text", "only a version", "version 0", "version true"],
)
def test_sound_file_with_another_payload_is_damage(step_dir: Path, payload: Any) -> None:
    """A right digest is no proof of a right content."""
    with pytest.raises(DamagedStateError, match="global_step_3"):
        load_state(publish_payload(step_dir / FILE_NAME, payload))


def test_code_in_a_file_is_named_and_never_advised_to_be_run(step_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own refusal says how to load the file all the same; ours says what it holds."""
    path = publish_payload(step_dir / FILE_NAME, Evil())
    with pytest.raises(DamagedStateError, match=r"GLOBAL \w+\.system\)") as caught:
        load_state(path)
    assert str(path) in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "evil" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "key",
    ["loader_state", "buffered_batch", "carry_over", "shared", "rng_state", "fingerprint", "run_id", "global_step"],
)
@pytest.mark.parametrize("value", ["text", [1], {"$type": "tuple"}, 10**30, "missing"], ids=repr)
def test_wrong_or_missing_part_is_damage(key: str, value: Any) -> None:
    """Never a KeyError or an AttributeError, whatever stands there."""
    payload = {**state_codec.encode_state(sample_state()), key: value}
    if value == "missing":
        del payload[key]
    try:
        state = state_codec.decode_state(payload)
    except DamagedStateError:
        return
    assert getattr(state, key) == value  # nothing to refuse: any text is a run id


# Publication


def test_mode_follows_the_umask_as_data_pt_does(step_dir: Path) -> None:
    """022 and 027."""
    for mask in (0o022, 0o027):
        old = os.umask(mask)
        try:
            path = commit_state(small_state(), step_dir)
            torch.save({}, step_dir / "data.pt")
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask == stat.S_IMODE((step_dir / "data.pt").stat().st_mode)


def test_symbolic_links_are_kept(tmp_path: Path) -> None:
    """A linked output folder, step folder and file; the temp file lives beside the real file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "out").symlink_to(disk)
    step_dir = tmp_path / "out" / "global_step_3"
    commit_state(small_state(), step_dir)
    assert names(disk / "global_step_3") == [FILE_NAME]
    store = tmp_path / "store"
    store.mkdir()
    (store / "real.pt").write_bytes(b"old")
    (step_dir / FILE_NAME).unlink()
    (step_dir / FILE_NAME).symlink_to(store / "real.pt")
    commit_state(small_state(run_id="run-2"), step_dir)
    assert (step_dir / FILE_NAME).is_symlink()
    assert names(store) == ["real.pt"]
    assert load_state(step_dir).run_id == "run-2"
    (store / f".{FILE_NAME}.1.0123abcd.tmp").write_bytes(b"")
    assert [path.parent for path in remove_leftover_temps(step_dir)] == [store]


def test_earlier_save_of_the_step_is_taken_apart_first(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old seal and data.pt go after the new content is durable and before it is visible; the rest stays."""
    commit_state(small_state(), step_dir)
    for name in ("agentlightning_seal.json", "data.pt", "other.txt"):
        (step_dir / name).write_text("old")
    seen: list[list[str]] = []
    rename = Path.rename

    def spy(self: Path, target: Path) -> Path:
        seen.append(names(step_dir))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", spy)
    commit_state(small_state(), step_dir)
    assert [[name for name in found if not name.endswith(".tmp")] for found in seen] == [[FILE_NAME, "other.txt"]]
    assert names(step_dir) == [FILE_NAME, "other.txt"]


def test_order_of_the_system_calls_makes_the_file_durable(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new folder's parent, then the content, then the rename, then the folder; each synced once."""
    log: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def spy_fsync(fd: int) -> None:
        log.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name.split('.tmp')[0][:30]}")
        fsync(fd)

    def spy_rename(self: Path, target: Path) -> Path:
        log.append("rename")
        return rename(self, target)

    monkeypatch.setattr(files.os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "rename", spy_rename)
    commit_state(small_state(), step_dir)
    top = step_dir.parent.parent.name[:30]
    temp = f".{FILE_NAME}"[:30]
    assert [line if temp not in line else f"fsync {temp}" for line in log] == [
        f"fsync {top}",
        "fsync out",
        f"fsync {temp}",
        "rename",
        "fsync global_step_3",
    ]


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def fail_at(real: Callable[..., Any], count: int, error: BaseException) -> Callable[..., Any]:
    """The real function, but for its `count`-th call, counted from 1."""
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            raise error
        return real(*args, **kwargs)

    return call


def old_step(step_dir: Path) -> bytes:
    path = commit_state(small_state(run_id="old"), step_dir)
    (step_dir / "data.pt").write_text("old")
    (step_dir / "agentlightning_seal.json").write_text("old")
    return path.read_bytes()


ALL_OLD = ["agentlightning_input.pt", "agentlightning_seal.json", "data.pt"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("fsync", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("open", errno.EACCES),
    ],
)
def test_failed_call_leaves_the_old_step_whole(
    step_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """The old file, its seal and data.pt stay, no temp remains, and the error keeps number, path and cause."""
    before = old_step(step_dir)
    with monkeypatch.context() as patch:
        calls: list[int] = []
        fail = failing(code)
        patch.setattr(files.os, name, lambda *args, **kwargs: (calls.append(1), fail(*args, **kwargs)))
        with pytest.raises(StateWriteError, match=os.strerror(code)) as caught:
            commit_state(sample_state(), step_dir)
        assert len(calls) == 1  # a failed fsync or write is never tried again
    assert caught.value.errno == code
    assert str(step_dir / FILE_NAME) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, OSError)
    assert names(step_dir) == ALL_OLD
    assert (step_dir / FILE_NAME).read_bytes() == before


def test_failed_close_leaves_the_old_step_whole(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems report a failed write only here; the descriptor is not closed twice."""
    before = old_step(step_dir)
    closed: list[int] = []
    close = os.close

    def fail(fd: int) -> None:
        closed.append(fd)
        close(fd)
        raise OSError(errno.EDQUOT, "quota")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "close", fail)
        with pytest.raises(StateWriteError, match="quota"):
            commit_state(sample_state(), step_dir)
    assert len(closed) == 1
    assert names(step_dir) == ALL_OLD
    assert (step_dir / FILE_NAME).read_bytes() == before


def test_failed_rename_leaves_the_old_file(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays; seal and data.pt had to go before, so the step is not taken for a whole one."""
    before = old_step(step_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(errno.EIO))
        with pytest.raises(StateWriteError):
            commit_state(sample_state(), step_dir)
    assert names(step_dir) == [FILE_NAME]
    assert (step_dir / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_failed_fsync_of_any_folder_raises(step_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Parent, output folder, content, folder: each failure raises; what is visible is then the new file or none."""
    before = old_step(step_dir) if count == 5 else None
    with monkeypatch.context() as patch:
        # In a fresh folder: two new folders, content, folder. In an old one: content, folder after the removal, folder.
        patch.setattr(files.os, "fsync", fail_at(os.fsync, 3 if count == 5 else count, OSError(errno.EIO, "broken")))
        with pytest.raises(StateWriteError, match="broken"):
            commit_state(small_state(run_id="new"), step_dir)
    path = step_dir / FILE_NAME
    if path.exists():
        assert path.read_bytes() != before
        assert load_state(step_dir).run_id == "new"
    assert remove_leftover_temps(step_dir) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_folder_that_cannot_be_synced_is_no_failure(step_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Some network file systems have no fsync for folders, and say so."""
    fsync = os.fsync

    def call(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(files.os, "fsync", call)
    commit_state(small_state(), step_dir)
    assert load_state(step_dir).run_id == "run-1"


def test_short_writes_are_completed(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call may move less than it was given; a call that moves nothing is an error, not an endless loop."""
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
        commit_state(small_state(), step_dir)
    assert_same(load_state(step_dir), small_state())
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", lambda fd, data: 0)
        with pytest.raises(StateWriteError, match="moved no byte"):
            commit_state(small_state(), step_dir)
    assert_same(load_state(step_dir), small_state())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["write", "fsync"])
def test_interrupt_removes_the_temp_file(
    step_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """Ctrl-C stays a KeyboardInterrupt, though torch sits between; at the second fsync the old seal is gone already."""
    before = old_step(step_dir)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, name, fail_at(getattr(os, name), count, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            commit_state(small_state(run_id="new", buffered_batch={"x": torch.zeros(1, 2**23)}), step_dir)
    assert names(step_dir) == (ALL_OLD if (name, count) != ("fsync", 2) else [FILE_NAME])
    assert (step_dir / FILE_NAME).read_bytes() == before


def test_unencodable_value_changes_nothing(step_dir: Path) -> None:
    """The error names the place; not even the folder is created."""
    state = small_state(buffered_batch={"image": [1, object()]})
    with pytest.raises(UnencodableValueError, match="column 'image', row 1"):
        commit_state(state, step_dir)
    assert not step_dir.exists()
    before = old_step(step_dir)
    with pytest.raises(UnencodableValueError):
        commit_state(state, step_dir)
    assert names(step_dir) == ALL_OLD
    assert (step_dir / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("name", ["encode_state", "save"])
def test_unexpected_error_while_encoding_changes_nothing(
    step_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever fails in torch or in the codec is a StateWriteError with its cause."""
    before = old_step(step_dir)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(storage if name == "encode_state" else torch, name, fail)
    with pytest.raises(StateWriteError, match="out of luck") as caught:
        commit_state(small_state(), step_dir)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert names(step_dir) == ALL_OLD
    assert (step_dir / FILE_NAME).read_bytes() == before


def test_trailer_that_could_not_be_read_is_not_written(step_dir: Path) -> None:
    """A run id of thousands of characters is refused by the writer, not by the reader hours later."""
    for run_id in ("x" * 2000, "x" * 20_000):
        with pytest.raises(StateWriteError, match=r"run_id|trailer"):
            commit_state(small_state(run_id=run_id), step_dir)
    assert names(step_dir) == []


def test_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    """Of the step folder, and of the output folder."""
    (tmp_path / "global_step_3").write_text("a file")
    (tmp_path / "out").write_text("a file")
    for folder in (tmp_path / "global_step_3", tmp_path / "out" / "global_step_3"):
        with pytest.raises(StateWriteError) as caught:
            commit_state(small_state(), folder)
        assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (tmp_path / "global_step_3").read_text() == "a file"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        done = subprocess.run(options, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("not allowed to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_leaves_the_old_step(tiny_disk: Path) -> None:
    """A real ENOSPC: the old step loads, its seal and data.pt are there, the room is free again."""
    step_dir = tiny_disk / "global_step_3"
    old_step(step_dir)
    large = small_state(run_id="new", buffered_batch={"x": torch.zeros(1, 10**6)})
    with pytest.raises(StateWriteError, match="No space") as caught:
        commit_state(large, step_dir)
    assert caught.value.errno == errno.ENOSPC
    assert names(step_dir) == ALL_OLD
    assert load_state(step_dir).run_id == "old"
    commit_state(small_state(run_id="new"), step_dir)
    assert load_state(step_dir).run_id == "new"


def test_read_only_disk_is_a_clear_error(tiny_disk: Path) -> None:
    """For a new step and for an old one."""
    old_step(tiny_disk / "global_step_3")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for step in (3, 4):
        with pytest.raises(StateWriteError, match="Read-only file system") as caught:
            commit_state(small_state(step), tiny_disk / f"global_step_{step}")
        assert caught.value.errno == errno.EROFS
    assert load_state(tiny_disk / "global_step_3").run_id == "old"


KILLED = """
import os, signal, sys
from pathlib import Path
from agl_async_ckpt.storage import files
from agl_async_ckpt.storage.commit import commit_state
from tests.golden.sample import small_state
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "rename":
    Path.rename = die
else:
    setattr(files.os, sys.argv[2], die)
commit_state(small_state(run_id="new"), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
def test_killed_writer_leaves_the_old_file_and_a_temp_that_is_cleaned(step_dir: Path, name: str) -> None:
    """SIGKILL in the middle; the next start removes the leftover, from the output folder too."""
    before = old_step(step_dir)
    done = subprocess.run([sys.executable, "-c", KILLED, str(step_dir), name], check=False, timeout=120)
    assert done.returncode == -9
    assert (step_dir / FILE_NAME).read_bytes() == before
    left = [path for path in names(step_dir) if path.endswith(".tmp")]
    assert len(left) == 1
    assert len(left[0]) <= 255
    (step_dir / "data.pt.tmp").write_text("not ours")
    assert [path.name for path in remove_leftover_temps(step_dir.parent)] == left
    assert "data.pt.tmp" in names(step_dir)
    assert remove_leftover_temps(step_dir) == []
    assert remove_leftover_temps(step_dir / "none") == []


def test_reader_beside_a_writer_never_sees_a_part(step_dir: Path) -> None:
    """A file that was opened before a rename is read to its end, whole."""
    path = commit_state(small_state(run_id="old"), step_dir)
    with path.open("rb") as file:
        first = file.read(100)
        commit_state(small_state(run_id="new"), step_dir)
        rest = file.read()
    payload = torch.load(io.BytesIO(first + rest), weights_only=True)
    assert payload["run_id"] == "old"
    assert read_trailer(path).run_id == "new"


def test_memory_error_is_not_called_damage(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too small says nothing about the file."""
    commit_state(small_state(), step_dir)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError):
        load_state(step_dir)


def test_every_error_of_a_load_has_one_base(step_dir: Path) -> None:
    """Callers catch StateFormatError for unusable bytes, and MemoryError stays out of it."""
    assert issubclass(DamagedStateError, StateFormatError)
    assert issubclass(ForeignFormatError, StateFormatError)
    assert issubclass(UnsupportedVersionError, StateFormatError)
    assert dataclasses.is_dataclass(load_state(commit_state(small_state(), step_dir)))
