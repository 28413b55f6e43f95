"""What participants of a mapping tell each other with their arrival."""

import threading

import pytest

from kvoffload_async.runtime.shared_region import NOTE_BYTES, SharedBuffer


def join(directory, participant, *, num_participants=2, note=b""):
    return SharedBuffer(
        "t",
        2 * 4096,
        4096,
        participant=participant,
        num_participants=num_participants,
        directory=directory,
        note=note,
    )


def padded(note):
    return note.ljust(NOTE_BYTES, b"\0")


def test_everybody_reads_everybodys_note_by_number(tmp_path):
    second = join(tmp_path, 1, note=b"second")
    first = join(tmp_path, 0, note=b"first")
    for one in (first, second):
        assert one.notes(0.0) == [padded(b"first"), padded(b"second")]
    first.release()
    assert second.notes(0.0) == [padded(b"first"), padded(b"second")]
    second.release()


def test_notes_are_waited_for_until_all_have_arrived(tmp_path):
    first = join(tmp_path, 0, note=b"first")
    found = []
    reader = threading.Thread(target=lambda: found.append(first.notes(20.0)))
    reader.start()
    second = join(tmp_path, 1, note=b"second")
    reader.join(60)
    assert found == [[padded(b"first"), padded(b"second")]]
    first.release()
    second.release()


def test_a_participant_that_does_not_come_is_named(tmp_path):
    first = join(tmp_path, 1, num_participants=3)
    with pytest.raises(TimeoutError, match=r"participants \[0, 2\].*have not arrived in time"):
        first.notes(0.0)
    first.release()


def test_a_note_touches_neither_rows_nor_flags(tmp_path):
    one = join(tmp_path, 0, num_participants=1, note=b"\xff" * NOTE_BYTES)
    assert not any(bytes(one.view.cast("B")))
    assert not any(bytes(one.slot_flags))
    one.release()
