"""The `slab` tier: a bounded store of preallocated files, for one process and a local disk.

Creating a file per block costs more than writing the block. Therefore blocks are stored in the
slots of a few large preallocated files, adjacent blocks are copied in one vectored call, and a
journal maps slots to keys.

The format, versions 2 and 3
============================

All numbers are little-endian. A store is a folder with these files:

    manifest.json         the store's parameters; written at creation and replacement
    lock                  locked (flock) by the process that has the store open; contains its pid
    session               clean-shutdown flags, and the last use of each block
    journal               which block is in which slot
    journal.new           the next journal; ignored until it is renamed
    journal.bad           an unreadable journal, kept for diagnosis; at most one
    segment-NNNNNN.slab   the blocks; NNNNNN is the decimal segment number, from 0
    *.tmp                 temporary files; removed at opening, like journal.new

The folder is `<root_dir>/<model>_r<rank>`, with slashes and zero bytes of the model's name replaced
by underscores. With `on_mismatch="new_namespace"`, a store of another layout in that folder is kept
and `<folder>_<digest>_<block bytes>` is used. With "replace", the other store is emptied under its
lock: the journal is removed, then the segments, then the new manifest is renamed over the old one.
A kill in between leaves an empty store of the old layout.

**Manifest.** A JSON object: `format` ("kvoffload-slab"), `version`, `block_bytes`, `slot_bytes`
(block_bytes, and 52 if encrypted, rounded up to 4096), `rank`, `run_config` (everything that
determines a block's byte layout), `layout` (text `<digest>:<rank>:<block_bytes>`, where the digest
is the first 12 hex digits of the SHA-256 of `run_config` as JSON with sorted keys and no blanks),
and `xxh3`: 16 hex digits of XXH3-64 of the object without this key, as JSON with sorted keys and no
blanks; `features`, `store_uuid` and, with an integrity key, its id in `integrity_key_id`.

**Segment.** The file begins with a header of 4096 bytes: "KVSLABS1", the 16 bytes of the store's
UUID, the segment's number and the bytes of a slot, 8 bytes each, XXH3-64 of these 40 bytes, zeros.
Then follow slots of `slot_bytes` each. A slot contains a block, its seal if it is encrypted, and
undefined padding. The file's
size determines the number of slots. A segment number is not reused while the journal may still
refer to it.

A file whose header has another segment number of this store is removed at opening; one with the
header of another store, or without a valid header, is kept but not used. Blocks that the journal
has in either are dropped.

**Journal.** Units of 128 bytes. A *frame* is a header followed by at least one record:

    offset  bytes  header                      offset  bytes  record
    0       8      "KVSLABF1"                  0       1      1: put, 2: remove
    8       8      sequence number             1       1      length of the key, at most 96
    16      4      number of records           2       2      flags, see below
    20      4      skipped sequence numbers    4       4      slot
    24      8      checksum of the frame       8       4      segment
    32      96     0                           12      4      tick of the last use
                                               16      16     checksum of the block, or zeros
                                               32      96     the key, then zeros

Flags of a record: 1, it has a checksum; 2, the block needs verification before use; 4, the checksum
is made with a key.

All records of a frame share its sequence number. It is that of the previous frame plus 1 plus the
number of skipped ones, which belong to failed appends. The frame's checksum is XXH3-64 of the
header's first 24 bytes and all records, seeded with XXH3-64 of `layout`, a zero byte and the
store's UUID as text. A block's checksum is XXH3-128 of its bytes, seeded with XXH3-64 of `layout`,
a zero byte and the key, or with an integrity key a MAC over the same. A block in the wrong slot
therefore fails verification.

**Encryption.** Version 3 has the incompatible feature `encryption`: a block is encrypted, and
behind it is its seal, as `kvoffload_async.tiers.files.sealing` specifies for the purpose "slab 3".
The checksum in the record is the seal's tag, and has flag 4. A record therefore has the length of
other records, and the journal and the index in memory take no more for a slot.

The last record of each address is valid. In a removal record only the address is used. A tick is a
logical time that rises with uses; blocks with equal ticks are ordered by their records.

The journal's file size is the size of its frames. Space for the worst case is preallocated behind
the end before a segment adds slots: units for a record per slot, and half as many for the log (at
least 32). When at most half of the log's units are left, compaction begins: `journal.new` is
created with the same preallocation. It receives every append from then on. Behind each append
follow records of existing blocks, in frames of at most 64, until all slots have been copied; the
rate completes it when half of the remaining space is used. Then it is synced to the device, without
blocking stores, and renamed over the journal. Before the rename only the old journal is valid,
after it only the new one: a kill leaves one complete journal. An append without space waits for the
compaction, up to its job's deadline. A compaction that fails is abandoned and retried later with a
new file. A journal of up to 8192 units is compacted synchronously by the append that lacks space.

**Session.** 128 bytes, then for each segment its number and its number of slots, 8 bytes each, and
4 bytes per slot: the tick of its last use when the store was last closed.

    offset  bytes
    0       8      "KVSLABO1"
    8       4      flags: 1 the store was closed, 2 everything was on the device then
    12      4      number of segments
    16      8      the journal's last sequence number at the time of writing
    24      8      XXH3-64 of everything behind the header
    32      40     boot id of the kernel, then zeros
    72      8      XXH3-64 of the preceding bytes
    80      48     0

Both checksums are seeded like those of frames. The session is synced before the first write to an
opened store.

Recovery from crashes and damage
================================

The order of writes makes the state after a kill at any point consistent. The removal of a block is
journalled before its slot is overwritten, and a block's record is appended after its bytes are
written, one append per job. Slots without a record are free. Recency since the last checkpoint is
lost, the order of stores is not. With `fsync` each of these steps is on the device before the
next; without it, blocks lost in a power failure are detected by their checksums.

A killed process loses no completed write. A machine crash may lose any of them. Therefore the
journal is trusted only if the session is of the current boot, or if the store was closed and synced
with nothing appended since; and never if the journal ends before the session's sequence number.
Otherwise all blocks need verification. At close, a store syncs the device if it has `fsync`, or
if it has no checksums and so cannot verify blocks later.

With `fsync`, a failed sync fails the jobs that it was for, and also those that wrote to any
segment before the failure: the kernel reports a lost write once, and a later successful sync proves
nothing. Blocks stored before are on the device.

A frame that does not verify, or whose sequence number is not higher than the previous one, is
ignored. Behind the last good frame it is a torn tail, and is cut off. Before a good frame it is
damage, as are missing sequence numbers. Missing frames may have removed any block recorded earlier;
such blocks are marked for verification in their records. An unreadable journal is kept as
journal.bad. A marked block is verified regardless of the configuration, and dropped if it has no
checksum. With verification on, blocks stored without a checksum are dropped as well.

Blocks in a missing segment, or beyond its end, are dropped. A manifest that is unreadable, or
missing next to other files, is an error: blocks cannot be interpreted without it. The remedy is to
remove the folder, if nothing else is in it.

Capacity
========

`capacity_bytes` limits the folder's allocated disk space: the segments with their extent metadata,
two journals, and the small files; see `layout`. If the capacity has been reduced, segments are
removed at opening, those with the oldest average last use first; the last one is truncated instead.
Segments are allocated when no slot is free, before anything is evicted: as many at once as threads
copy blocks, smaller ones in a small store. Jobs use them in turn, because the kernel serialises
writes to one file. At the maximum number of segments, up to 256 slots are kept free, but at most a
sixteenth of all and 32 MiB: so blocks that are stored together get adjacent slots, even after long
use. A full disk ends the growth earlier; it is retried after a minute. If there is no space for the
next journal, or, without preallocation or with copy-on-write, for a block or a record, jobs fail
with a full tier until there is.
"""
