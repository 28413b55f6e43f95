"""The `slab` tier: a bounded store of preallocated files, for one process and a local disk.

A file a block cannot be fast: making files costs more than filling them. Here blocks lie in the
slots of a few large files that are allocated once, neighbours are moved in one vectored call, and
a journal says what lies where.

The format, version 2
=====================

Byte by byte, and what became of version 1, in docs/formats.md.

All numbers are little-endian. A store is a folder; its files are

    manifest.json         what the store is; written when it is made or replaced
    lock                  locked (flock) by the process that has the store open, whose id it holds
    journal               which block lies where
    segment-NNNNNN.slab   the blocks; NNNNNN is the segment's number, in decimal, from 0
    journal.tmp, manifest.json.tmp   being written; what is found when a store is opened is removed

The folder is `<root_dir>/<model>_r<rank>`, with slashes and zero bytes of the model's name replaced
by underscores; `<that>_<digest>_<block bytes>` if another layout has it and that was asked for.
If it was asked to replace the other store instead, that is emptied under its lock: the journal is
removed, then the segments, then the new manifest is renamed over the old one. A kill in between
leaves an empty store of the old layout.

**Manifest.** A JSON object: `format` ("kvoffload-slab"), `version`, `block_bytes`, `slot_bytes`
(block_bytes rounded up to 4096), `rank`, `run_config` (everything that the layout of a block's
bytes depends on), `layout` (text `<digest>:<rank>:<block_bytes>`, the digest being the first 12
hex digits of the SHA-256 of `run_config` as JSON with sorted keys and no blanks), and `xxh3`: 16
hex digits of XXH3-64 of the object without this key, as JSON with sorted keys and no blanks.
Version 2 has `features`, `store_uuid` and, with an integrity key, its id in `integrity_key_id`.

**Segment.** Slots of `slot_bytes` one behind the other, no header. A slot holds a block's bytes;
what is behind them means nothing. How many slots there are follows from the file's size. A number
is not used again while the journal can speak of it.

**Journal.** Units of 128 bytes. A *frame* is a header and at least one record:

    offset  bytes  header                      offset  bytes  record
    0       8      "KVSLABF1"                  0       1      1: put, 2: remove
    8       8      sequence number             1       1      bytes of the key, at most 96
    16      4      records that follow         2       2      flags, see below
    20      4      0                           4       4      slot
    24      8      checksum of the frame       8       4      segment
    32      96     0                           12      4      0
                                               16      16     checksum of the block, or zeros
                                               32      96     the key, then zeros

Flags of a record: 1, it has a checksum; 2, it is suspect; 4, the checksum is by the integrity key.

The sequence number of a record is its frame's; sequence numbers rise from frame to frame. The
frame's checksum is XXH3-64 of the header's first 24 bytes and all records, seeded with XXH3-64 of
`layout`. The block's is XXH3-128 of its bytes, seeded with XXH3-64 of `layout`, a zero byte and the
key, or with an integrity key a MAC over the same: right bytes in a wrong slot do not verify.

A reader takes the last record of every place. The journal begins with a *checkpoint*, puts alone,
the least recently used block first, in frames of at most 64 records; what was appended since is
behind it. When that has grown to the number of slots (at least 64 units), and when a store is
closed, a new journal is written beside the old one and renamed over it.

What a crash or damage leaves
=============================

The order of writes makes every state right that a kill can leave. The removal of a block is
journalled before its slot is written to again, and a block's record after its bytes, one append a
job. What was allocated or written without a record is free. Recency since the last checkpoint is
lost, the order of stores is not. With `fdatasync` each of these steps is on the device before the
next; without it, a block that a power cut has lost is found by its checksum.

A frame that does not verify, or is no newer than the one before, does not count. Behind the last
good one it is a torn tail, and is cut off. Before a good one it is damage, and may have been the
removal of any block recorded earlier: those become *suspect*, which is kept with their records.
A suspect block is verified whatever the configuration says, and one without a checksum is dropped.
With verification on, blocks that were stored without a checksum are dropped as well.

Blocks of a segment whose file is gone, or behind its end, are gone. A manifest that is unreadable,
or missing beside other files, is an error: it alone says what the blocks are.

Capacity
========

`capacity_bytes` bounds what the folder takes on disk, as allocated: the segments with the extents
that the filesystem needs for them, the journal and its successor at the moment of the rename, and
the small files; see `budget`. Segments are allocated when there is no free slot and before anything
is evicted: as many at once as threads move blocks, smaller ones in a small store. Jobs go to them
in turn, as the kernel lets one thread at a time write into a file. Once there are as many as fit,
up to 256 slots stand free, though never more than a sixteenth of them or 32 MiB: so blocks that are
stored together find neighbouring slots, also after long use. A disk that is full earlier ends the
growth; if even the journal has no room, a segment is given back, by unlinking it. Growth is tried
again after a minute.
"""
