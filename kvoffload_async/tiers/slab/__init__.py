"""The `slab` tier: a bounded store of preallocated files, for one process and a local disk.

A file a block cannot be fast: making files costs more than filling them. Here blocks lie in the
slots of a few large files that are allocated once, neighbours are moved in one vectored call, and
a journal says what lies where.

The format, version 2
=====================

Byte by byte in docs/formats.md.

All numbers are little-endian. A store is a folder; its files are

    manifest.json         what the store is; written when it is made or replaced
    lock                  locked (flock) by the process that has the store open, whose id it holds
    session               whether that process closed the store, and when blocks were last used
    journal               which block lies where
    journal.new           the next journal; means nothing until it is renamed
    journal.bad           a journal of which nothing could be read; kept, one at most
    segment-NNNNNN.slab   the blocks; NNNNNN is the segment's number, in decimal, from 0
    *.tmp                 being written; these and journal.new are removed at the opening

The folder is `<root_dir>/<model>_r<rank>`, with slashes and zero bytes of the model's name replaced
by underscores; `<that>_<digest>_<block bytes>` if another layout has it and that was asked for.
If it was asked to replace the other store instead, that is emptied under its lock: the journal is
removed, then the segments, then the new manifest is renamed over the old one. A kill in between
leaves an empty store of the old layout.

**Manifest.** A JSON object: `format` ("kvoffload-slab"), `version`, `block_bytes`, `slot_bytes`
(block_bytes rounded up to 4096), `rank`, `run_config` (everything that the layout of a block's
bytes depends on), `layout` (text `<digest>:<rank>:<block_bytes>`, the digest being the first 12
hex digits of the SHA-256 of `run_config` as JSON with sorted keys and no blanks), and `xxh3`: 16
hex digits of XXH3-64 of the object without this key, as JSON with sorted keys and no blanks. Also
`features`, `store_uuid` and, with an integrity key, its id in `integrity_key_id`.

**Segment.** A header of 4096 bytes: "KVSLABS1", the 16 bytes of the store's UUID, the segment's
number and the bytes of a slot, 8 bytes each, XXH3-64 of these 40 bytes, zeros. Then slots of
`slot_bytes` one behind the other. A slot holds
a block's bytes; what is behind them means nothing. How many slots there are follows from the file's
size. A number is not used again while the journal can speak of it.

A segment that says it is another one of this store is removed at the opening, one that is another
store's or says nothing is left alone; the blocks that the journal has in them are dropped.

**Journal.** Units of 128 bytes. A *frame* is a header and at least one record:

    offset  bytes  header                      offset  bytes  record
    0       8      "KVSLABF1"                  0       1      1: put, 2: remove
    8       8      sequence number             1       1      bytes of the key, at most 96
    16      4      records that follow         2       2      flags, see below
    20      4      numbers that are skipped    4       4      slot
    24      8      checksum of the frame       8       4      segment
    32      96     0                           12      4      tick of the last use
                                               16      16     checksum of the block, or zeros
                                               32      96     the key, then zeros

Flags of a record: 1, it has a checksum; 2, it is suspect; 4, the checksum is by the integrity key.

The sequence number of a record is its frame's. It is one more than that of the frame before, and as
many more as the frame says it skips: those are of appends that failed. The frame's
checksum is XXH3-64 of the header's first 24 bytes and all records, seeded with XXH3-64 of `layout`,
a zero byte and the store's UUID as text. The block's is XXH3-128 of its bytes, seeded with XXH3-64 of `layout`, a
zero byte and the key, or with an integrity key a MAC over the same: right bytes in a wrong slot do
not verify.

A reader takes the last record of every place. Of a removal only the place means anything. Ticks
rise with the uses; blocks that have the same one are in the order of their records.

The journal is as long as its frames; what it may need for all slots there are is allocated behind
its end, before a segment gets these slots: units for a record of each and half as many for the log
(at least 32). When no more than half of the log's units are left, `journal.new`, for which as much
is allocated already, is begun. It gets every append from then on, and behind each of them, until
all slots were looked at, records of blocks that are there, in frames of at most 64: as many as are
needed for it to be complete when half of the rest is full. It is waited for on the device,
by no store, and renamed over the journal. Up to the rename it means nothing, and from then on the
old one does: a kill leaves one of the two, each of them complete. An append for which there is no
room before it is on the device waits for that, up to its job's deadline. One that cannot be written
or waited for is given up, and begun in a new file later. A journal of up to 8192 units is written
anew by the append that has no room.

**Session.** 128 bytes, then for each segment its number and how many slots it has, 8 bytes each,
and 4 bytes a slot: the tick of its last use when the store was last closed.

    offset  bytes
    0       8      "KVSLABO1"
    8       4      flags: 1 the store was closed, 2 everything was on the device then
    12      4      segments that follow
    16      8      the journal's last sequence number when this was written
    24      8      XXH3-64 of what follows the header
    32      40     boot id of the kernel, then zeros
    72      8      XXH3-64 of the bytes before
    80      48     0

Both checksums are seeded as those of frames. It is on the device before an opened store is written
to.

What a crash or damage leaves
=============================

The order of writes makes every state right that a kill can leave. The removal of a block is
journalled before its slot is written to again, and a block's record after its bytes, one append a
job. What was allocated or written without a record is free. Recency since the last checkpoint is
lost, the order of stores is not. With `fdatasync` each of these steps is on the device before the
next; without it, a block that a power cut has lost is found by its checksum.

A process that is killed loses nothing that it has written. A machine that goes down may lose any of
it, so the journal is believed only if the session is of this boot, or if the store was closed and
on the device then, with nothing appended since; and never if it has lost its end, which the
session's sequence number tells. Else all blocks become *suspect*. At its close, a store waits for the device if it has
`fdatasync`, or has no checksums, for which nothing else vouches.

With `fdatasync`, where waiting for the device fails, the jobs fail whose bytes were being waited
for, and so do those whose bytes were written to any segment before it failed: the kernel reports a
loss once, and a later wait that succeeds proves nothing. What was stored before is on the device.

A frame that does not verify, or is no newer than the one before, does not count. Behind the last
good one it is a torn tail, and is cut off. Before a good one it is damage, as are numbers that are
missing, and may have been the removal of any block recorded earlier: those become *suspect*, which
is kept with their records. A journal of which nothing can be read is kept aside.
A suspect block is verified whatever the configuration says, and one without a checksum is dropped.
With verification on, blocks that were stored without a checksum are dropped as well.

Blocks of a segment whose file is gone, or behind its end, are gone. A manifest that is unreadable,
or missing beside other files, is an error: it alone says what the blocks are.

Capacity
========

`capacity_bytes` bounds what the folder takes on disk, as allocated: the segments with the extents
that the filesystem needs for them, two journals, and the small files; see `layout`. If it is
smaller at the opening than what is there, segments are given up, those first whose blocks were last
used the longest ago on average, and the last one is only made shorter. Segments are allocated when
there is no free slot and before anything is evicted: as many at once as threads move blocks,
smaller ones in a small store. Jobs go to them in turn, as the kernel lets one thread at a time
write into a file. Once there are as many as fit, up to 256 slots stand free, though never more than
a sixteenth of them or 32 MiB: so blocks that are stored together find neighbouring slots, also
after long use. A disk that is full earlier ends the growth; if even the journal has no room, a
segment is given back, by unlinking it. Once one was given back in vain, jobs fail for want of room
and the store stays as it is, until something can be stored. Growth is tried again after a minute.
"""
