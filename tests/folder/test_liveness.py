"""Proof of life: which times a run's lives account for, on the server's clock, and what is written of them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from agl_async_ckpt.folder import liveness
from agl_async_ckpt.folder.liveness import ProofOfLife, Span, read_lives, within_one_life
from agl_async_ckpt.storage.files import remove_leftover_temps
from agl_async_ckpt.storage.layout import ALIVE_FILE_NAME

T0 = 1_700_000_000.0


def header(server_time: float) -> str:
    """The `Date` header of an answer given at `server_time`, whole seconds as RFC 9110 has them."""
    return format_datetime(datetime.fromtimestamp(int(server_time), timezone.utc), usegmt=True)


class Steady:
    """The process's own clock; it says nothing of the server's time."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Steady:
    """The module's clock, which stands still unless moved."""
    clock = Steady()
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def live(folder: Path, clock: Steady, *times: float, run_id: str = "run") -> ProofOfLife:
    """A life that sees the server at `times`."""
    proof = ProofOfLife(folder, run_id)
    for moment in times:
        clock.now += 10
        proof.seen(header(moment))
    return proof


def test_life_lasts_from_its_first_to_its_last_answer(tmp_path: Path, clock: Steady) -> None:
    """The first second counts only from its end: what ended earlier in it may have ended without a trainer."""
    live(tmp_path, clock, T0, T0 + 3, T0 + 60)
    assert read_lives(tmp_path, "run") == (Span(T0 + 1, T0 + 60),)


def test_creation_after_the_first_answer_moves_no_beginning(tmp_path: Path, clock: Steady) -> None:
    """A life that begins by waiting for adopted rollouts began then."""
    proof = live(tmp_path, clock, T0)
    assert proof.has_begun
    proof.begin(T0 - 5)
    clock.now += 5
    proof.seen(header(T0 + 9))
    assert read_lives(tmp_path, "run") == (Span(T0 + 1, T0 + 9),)


def test_life_of_one_answer_accounts_for_nothing(tmp_path: Path, clock: Steady) -> None:
    """Within its only second nothing is known for sure."""
    live(tmp_path, clock, T0)
    (span,) = read_lives(tmp_path, "run")
    assert not any(span.holds(T0 + part) for part in (0, 0.5, 1))


def test_lives_add_up_and_the_gaps_between_them_stay(tmp_path: Path, clock: Steady) -> None:
    """The third life still knows when nobody was there between the first and the second."""
    live(tmp_path, clock, T0, T0 + 10)
    second = live(tmp_path, clock, T0 + 20, T0 + 30)
    assert second.earlier_lives == (Span(T0 + 1, T0 + 10),)
    third = live(tmp_path, clock)
    assert third.earlier_lives == (Span(T0 + 1, T0 + 10), Span(T0 + 21, T0 + 30))
    live(tmp_path, clock, T0 + 40, T0 + 50)
    assert len(read_lives(tmp_path, "run")) == 3


def test_life_that_never_saw_the_server_leaves_the_earlier_ones_alone(tmp_path: Path, clock: Steady) -> None:
    """A start that dies before its first answer moves no boundary."""
    live(tmp_path, clock, T0, T0 + 10)
    before = (tmp_path / ALIVE_FILE_NAME).read_bytes()
    live(tmp_path, clock).seen(None)
    assert (tmp_path / ALIVE_FILE_NAME).read_bytes() == before


def test_own_answers_do_not_count_as_an_earlier_life(tmp_path: Path, clock: Steady) -> None:
    """What a resume may adopt is decided by the lives before it, however late it asks."""
    proof = live(tmp_path, clock, T0, T0 + 10)
    assert proof.earlier_lives == ()


def test_lives_of_another_run_are_not_taken_over(tmp_path: Path, clock: Steady) -> None:
    """A folder that changed its run begins without proofs."""
    live(tmp_path, clock, T0, T0 + 10, run_id="other")
    assert read_lives(tmp_path, "run") == ()
    live(tmp_path, clock, T0 + 20, T0 + 30)
    assert read_lives(tmp_path, "run") == (Span(T0 + 21, T0 + 30),)


def test_file_is_written_at_most_once_a_second_and_per_header(tmp_path: Path, clock: Steady) -> None:
    """A trainer polls hundreds of times a second; the file changes when the header's second does."""
    path = tmp_path / ALIVE_FILE_NAME
    proof = live(tmp_path, clock, T0)
    path.unlink()
    clock.now += 5
    proof.seen(header(T0))
    assert not path.exists(), "the same header says nothing new"
    proof.seen(header(T0 + 1))
    assert path.exists()
    path.unlink()
    clock.now += 0.5
    proof.seen(header(T0 + 2))
    assert not path.exists(), "half a second after the last write"
    clock.now += 0.5
    proof.seen(header(T0 + 2))
    assert read_lives(tmp_path, "run") == (Span(T0 + 1, T0 + 2),)


@pytest.mark.parametrize("text", [None, "", "yesterday", "Tue, 99 Nov 2023 22:13:20 GMT", "0"])
def test_headers_that_are_no_date_are_ignored(tmp_path: Path, clock: Steady, text: str | None) -> None:
    """A proxy that drops or mangles the header costs proofs, not the step."""
    proof = ProofOfLife(tmp_path, "run")
    proof.seen(text)
    assert not (tmp_path / ALIVE_FILE_NAME).exists()
    proof.seen(header(T0))
    assert (tmp_path / ALIVE_FILE_NAME).exists()


def test_missing_folder_is_said_and_does_not_end_the_run(
    tmp_path: Path, clock: Steady, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder may be moved away under a running trainer; said once, not every second."""
    proof = live(tmp_path / "gone", clock, T0, T0 + 1, T0 + 2)
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    clock.now += 10
    proof.seen(header(T0 + 3))
    assert read_lives(tmp_path / "gone", "run") == (Span(T0 + 1, T0 + 3),)
    assert "cannot be kept fresh (" in caplog.text
    assert "run more rollouts again" in caplog.text


def test_no_part_of_a_write_is_left_behind(tmp_path: Path, clock: Steady) -> None:
    """The file is replaced as a whole."""
    live(tmp_path, clock, T0, T0 + 5)
    assert [path.name for path in tmp_path.iterdir()] == [ALIVE_FILE_NAME]


GOOD = {"run_id": "run", "lives": [[1.0, 2.0]]}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"null", b"[]", b"7", b'"run"', b"\xff\xfe", b"[" * 100_000),
        json.dumps({**GOOD, "lives": None}).encode(),
        json.dumps({**GOOD, "lives": [[1.0]]}).encode(),
        json.dumps({**GOOD, "lives": [["a", "b"]]}).encode(),
        json.dumps({**GOOD, "lives": [1.0, 2.0]}).encode(),
        json.dumps({**GOOD, "lives": [[1.0, 10**400]]}).encode(),
        json.dumps({"run_id": "run"}).encode(),
        json.dumps({"lives": [[1.0, 2.0]]}).encode(),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_damaged_file_proves_nothing(tmp_path: Path, clock: Steady, data: bytes) -> None:
    """Whatever is in the file, a resume goes on without proofs, and the next life writes a good one."""
    (tmp_path / ALIVE_FILE_NAME).write_bytes(data)
    assert read_lives(tmp_path, "run") == ()
    live(tmp_path, clock, T0, T0 + 5)
    assert read_lives(tmp_path, "run") == (Span(T0 + 1, T0 + 5),)


def test_missing_file_and_directory_in_its_place_prove_nothing(tmp_path: Path) -> None:
    """Neither is an error."""
    assert read_lives(tmp_path, "run") == ()
    (tmp_path / ALIVE_FILE_NAME).mkdir()
    assert read_lives(tmp_path, "run") == ()


def test_number_of_lives_on_file_is_bounded(tmp_path: Path, clock: Steady, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is preempted for ever the newest lives are kept."""
    monkeypatch.setattr(liveness, "MAX_LIVES", 3)
    for number in range(6):
        live(tmp_path, clock, T0 + 100 * number, T0 + 100 * number + 10)
    assert read_lives(tmp_path, "run")[-1] == Span(T0 + 501, T0 + 510)
    assert len(read_lives(tmp_path, "run")) == 4, "three earlier lives, and this one"


@pytest.mark.parametrize(
    ("times", "inside"),
    [
        ((1.0,), True),
        ((2.0,), True),
        ((1.0, 2.0), True),
        ((0.99,), False),
        ((2.01,), False),
        ((3.0,), False),
        ((4.5,), True),
        ((1.5, 4.5), False),
        ((0.5, 1.5), False),
    ],
)
def test_times_must_lie_in_the_same_life(times: tuple[float, ...], inside: bool) -> None:
    """A rollout that began under one trainer and ended under the next has seen the gap between them."""
    assert within_one_life((Span(1.0, 2.0), Span(4.0, 5.0)), *times) is inside


def test_without_a_life_nothing_is_proven() -> None:
    """The first start of a run, or a lost file."""
    assert not within_one_life((), 1.0)


def test_life_begins_with_the_first_rollout_that_it_creates(tmp_path: Path, clock: Steady) -> None:
    """Known exactly from the record, while the header of the first answer may name an earlier or a later second."""
    for number, first_header in enumerate((T0 - 2, T0, T0 + 5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        proof = ProofOfLife(folder, "run")
        assert not proof.has_begun
        proof.begin(T0 + 0.25)
        proof.begin(T0 + 3)
        assert proof.has_begun
        for moment in (first_header, T0 + 60):
            clock.now += 10
            proof.seen(header(moment))
        assert read_lives(folder, "run") == (Span(T0 + 0.25, T0 + 60),)


def test_temp_file_of_a_killed_writer_is_removed_at_the_next_start(tmp_path: Path, clock: Steady) -> None:
    """It is named like every other temp file of the package."""
    proof = live(tmp_path, clock, T0)
    proof._temp.write_text("{")
    assert remove_leftover_temps(tmp_path) == [proof._temp]


def test_restart_of_the_server_takes_all_spans_with_it(tmp_path: Path, clock: Steady) -> None:
    """A new server's clock may be behind: what ends on it must not fall into a span of the old one's."""
    live(tmp_path, clock, T0, T0 + 60)
    proof = live(tmp_path, clock, T0 + 100, T0 + 160)
    proof.forget()
    assert read_lives(tmp_path, "run") == ()
    assert not proof.has_begun
    proof.begin(T0 - 500)
    clock.now += 10
    proof.seen(header(T0 - 440))
    assert read_lives(tmp_path, "run") == (Span(T0 - 500, T0 - 440),)


def test_life_that_knows_nothing_has_nothing_to_forget(tmp_path: Path, clock: Steady) -> None:
    """The first start of a run meets an empty server, too: no file is written for it."""
    ProofOfLife(tmp_path, "run").forget()
    assert list(tmp_path.iterdir()) == []
