/* Processing of one part of a batch by a thread, and the system calls.

   Threads: everything here runs on the engine's thread that owns the part, except for cut_batch
   (owner's thread) and cancel_part (under the engine's mutex).

   Ownership: descriptors opened here are closed before the part ends. A digest is computed piece by
   piece while the piece is in the CPU cache: before a write, after a read. So are blocks encrypted,
   into memory of the thread, and decrypted, in their rows. */

#include "block_io.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

enum {
    MAX_PIECE_ROWS = 64,
    NAMES_PER_PART = 16,
    RESOLVE_NOTHING_ELSE = 0x02 | 0x04 | 0x08, /* RESOLVE_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH */
    OPENAT2 = 437,                             /* on every architecture but Alpha */
    NOREPLACE = 1,
    LINE_BYTES = 64,
    PREFETCHED_BYTES = 1024,
    MAX_INTERRUPTIONS = 64, /* of one call; none expected, since the threads block signals */
};

static const unsigned char zeros[MAX_PAD_BYTES];

static size_t least(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* -- moving rows -------------------------------------------------------------------------------- */

/* Makes a call, retries it after EINTR, and records its start for the detection of hangs. */
static int64_t make_call(struct worker *worker, struct file_call call)
{
    int64_t result;
    int times = 0;
    call.folders = &worker->folders;
    do {
        atomic_store_explicit(&worker->in_call_since_ns, monotonic_ns(), memory_order_relaxed);
        result = worker->engine->call(&call);
        atomic_store_explicit(&worker->in_call_since_ns, 0, memory_order_relaxed);
        count_up(worker->engine, SYSTEM_CALLS, 1);
    } while (result == -EINTR && call.kind != CALL_CLOSE && ++times < MAX_INTERRUPTIONS);
    return result == -EINTR && call.kind == CALL_CLOSE ? 0 : result; /* closed nevertheless */
}

/* Transfers `needed` bytes in as many calls as needed. Returns the bytes, fewer only at the end
   of a file that is read, or -errno. Modifies the buffer array. */
static int64_t move_buffers(struct worker *worker, struct file_call call, struct iovec *buffers,
                            size_t needed)
{
    size_t done = 0;
    count_up(worker->engine, PIECES, 1);
    while (done < needed) {
        call.buffers = buffers;
        int64_t result = make_call(worker, call);
        if (result < 0)
            return result;
        if (result == 0)
            return call.kind == CALL_WRITE ? -EIO : (int64_t)done;
        size_t moved = (size_t)result;
        done += moved;
        call.offset += result;
        while (call.num_buffers > 0 && moved >= buffers->iov_len) {
            moved -= buffers->iov_len;
            buffers++;
            call.num_buffers--;
        }
        if (call.num_buffers > 0) {
            buffers->iov_base = (char *)buffers->iov_base + moved;
            buffers->iov_len -= moved;
        }
    }
    count_up(worker->engine, BYTES, done);
    return (int64_t)done;
}

static unsigned char *row_of(const struct batch *batch, size_t index)
{
    return batch->memory.base + (size_t)batch->rows[index] * batch->memory.row_bytes;
}

/* Hashes bytes of some rows from `at`; a nonzero `at` continues the previous call. */
static void hash_rows(struct worker *worker, const struct batch *batch, size_t first, size_t num,
                      size_t at, size_t bytes)
{
    const struct hashes *hashes = &worker->engine->hashes;
    for (size_t i = first; i < first + num; i++) {
        if (at == 0)
            hashes->reset(worker->hash_state, batch->seeds[i]);
        hashes->update(worker->hash_state, row_of(batch, i) + at, bytes);
        if (at + bytes == batch->memory.row_bytes) {
            struct hash128 hash = hashes->digest(worker->hash_state);
            uint64_t digest[2] = {htobe64(hash.high), htobe64(hash.low)};
            memcpy(digest_of(batch, i), digest, DIGEST_BYTES);
        }
    }
    count_up(worker->engine, HASHED_BYTES, num * bytes);
}

/* Hashes or encrypts bytes of some rows from `at`, before they are written. Returns 0 or a status. */
static int encode_rows(struct worker *worker, const struct batch *batch, size_t first, size_t num,
                       size_t at, size_t bytes)
{
    int status = 0;
    if (batch->bound == NULL && batch->has_digests)
        hash_rows(worker, batch, first, num, at, bytes);
    for (size_t i = 0; batch->bound != NULL && i < num && status == 0; i++)
        status = seal_piece(worker, batch, first + i, at, worker->sealed + i * bytes,
                            row_of(batch, first + i) + at, bytes);
    return status;
}

/* Hashes or decrypts bytes of some rows from `at`, of which the first `num_read` were read. Of a
   row that cannot be decrypted, or was not read to its end, no byte is left. */
static void decode_rows(struct worker *worker, const struct batch *batch, size_t first, size_t num,
                        size_t num_read, size_t at, size_t bytes)
{
    if (batch->bound == NULL && batch->has_digests)
        hash_rows(worker, batch, first, num_read, at, bytes);
    for (size_t i = first; batch->bound != NULL && i < first + num; i++) {
        unsigned char *row = row_of(batch, i);
        if (i < first + num_read && batch->statuses[i] == 0)
            batch->statuses[i] =
                (unsigned char)seal_piece(worker, batch, i, at, row + at, row + at, bytes);
        if (i >= first + num_read || batch->statuses[i] != 0)
            memset(row, 0, at + bytes);
    }
}

struct span { /* consecutive rows of a batch in a file */
    int fd;
    int64_t offset;
    size_t first;
    size_t num;
    size_t tail_bytes;  /* of a seal behind each row */
    size_t pad_bytes;   /* padding of each row, from its seal on; optional for the last one read */
    size_t moved_bytes; /* including padding, from the offset */
};

/* Returns 0 or a status for the result of a transfer. */
static int status_of(int64_t moved, size_t needed)
{
    if (moved < 0)
        return moved > -STATUS_NOT_DECRYPTED ? (int)-moved : EIO; /* fits a byte */
    return (size_t)moved < needed ? STATUS_ENDED_EARLY : 0;
}

/* Reads the seal behind a row, where it does not come with the row's first piece. */
static int read_seal(struct worker *worker, const struct batch *batch, const struct span *span,
                     size_t index)
{
    size_t slot_bytes = batch->memory.row_bytes + span->pad_bytes;
    struct iovec buffer = {digest_of(batch, index), span->tail_bytes};
    struct file_call call = {.kind = CALL_READ, .fd = span->fd, .num_buffers = 1};
    call.offset = span->offset + (int64_t)((index - span->first) * slot_bytes);
    call.offset += (int64_t)batch->memory.row_bytes;
    return status_of(move_buffers(worker, call, &buffer, span->tail_bytes), span->tail_bytes);
}

/* Copies rows: several small ones per call, large ones in pieces. Returns 0 or a status. */
static int move_rows(struct worker *worker, const struct batch *batch, struct span *span)
{
    struct iovec buffers[3 * MAX_PIECE_ROWS];
    size_t row_bytes = batch->memory.row_bytes, pad_bytes = span->pad_bytes;
    size_t piece_bytes = worker->engine->limits.piece_bytes, tail_bytes = span->tail_bytes;
    size_t most = least(piece_bytes / (row_bytes + pad_bytes), MAX_PIECE_ROWS), num, bytes;
    bool is_store = batch->is_store, is_sealed_store = is_store && batch->bound != NULL;
    struct iovec pad = {is_store ? (void *)(uintptr_t)zeros : worker->scratch,
                        pad_bytes - tail_bytes};
    struct file_call call = {.kind = is_store ? CALL_WRITE : CALL_READ, .fd = span->fd};
    int status = 0;
    for (size_t i = 0; i < span->num; i += num) {
        num = most == 0 ? 1 : least(most, span->num - i);
        if (tail_bytes > 0 && !is_store && row_bytes > piece_bytes)
            status = read_seal(worker, batch, span, span->first + i);
        for (size_t at = 0; at < row_bytes && status == 0; at += bytes) {
            size_t first = span->first + i, start = i * (row_bytes + pad_bytes) + at, needed = 0;
            bytes = least(piece_bytes, row_bytes - at);
            bool is_last = at + bytes == row_bytes;
            size_t end_bytes = is_last ? tail_bytes : 0, gap_bytes = is_last ? pad_bytes : 0;
            call.num_buffers = 0;
            for (size_t j = first; j < first + num; j++) {
                buffers[call.num_buffers++] = (struct iovec){
                    is_sealed_store ? worker->sealed + (j - first) * bytes : row_of(batch, j) + at,
                    bytes};
                if (end_bytes > 0)
                    buffers[call.num_buffers++] = (struct iovec){digest_of(batch, j), end_bytes};
                if (gap_bytes > end_bytes)
                    buffers[call.num_buffers++] = pad;
                needed += bytes + (is_store || j < first + num - 1 ? gap_bytes : end_bytes);
            }
            if (is_store && (status = encode_rows(worker, batch, first, num, at, bytes)) != 0)
                break;
            call.offset = span->offset + (int64_t)start;
            int64_t moved = move_buffers(worker, call, buffers, needed);
            if (!is_store) {
                size_t reach = moved < 0 ? 0 : (size_t)moved + gap_bytes;
                size_t num_read = reach < end_bytes ? 0 : (reach - end_bytes) / (bytes + gap_bytes);
                decode_rows(worker, batch, first, num, least(num_read, num), at, bytes);
            }
            span->moved_bytes = moved < 0 ? span->moved_bytes : start + (size_t)moved;
            status = status_of(moved, needed);
        }
        if (status != 0)
            break;
    }
    return status;
}

static void move_extents(struct worker *worker, const struct part *part)
{
    const struct batch *batch = part->batch;
    size_t slot_bytes = batch->memory.slot_bytes, pad_bytes = slot_bytes - batch->memory.row_bytes;
    size_t end = part->first + part->count, skip = part->skip;
    const struct run *run = &batch->runs[part->run];
    for (size_t i = part->first; i < end; run++, skip = 0) {
        struct span span = {.fd = (int)run->fd,
                            .offset = run->offset + (int64_t)(skip * slot_bytes),
                            .first = i,
                            .num = least((size_t)run->length - skip, end - i),
                            .tail_bytes = batch->bound == NULL ? 0 : batch->digest_bytes,
                            .pad_bytes = pad_bytes};
        int status = move_rows(worker, batch, &span);
        size_t num_whole = (span.moved_bytes + pad_bytes - span.tail_bytes) / slot_bytes;
        memset(batch->statuses + i + num_whole, status, span.num - num_whole);
        i += span.num;
    }
}

/* -- files -------------------------------------------------------------------------------------- */

/* Makes a call without rows, on a file or on a name below the root. */
static int64_t call_file(struct worker *worker, const struct batch *batch, enum call_kind kind,
                         int fd, const char *name, void *value, size_t bytes)
{
    struct iovec buffer = {value, bytes};
    return make_call(worker, (struct file_call){.kind = kind,
                                                .fd = fd,
                                                .root = &batch->root,
                                                .name = name,
                                                .buffers = &buffer,
                                                .num_buffers = value != NULL,
                                                .offset = (int64_t)bytes});
}

static int64_t open_file(struct worker *worker, const struct batch *batch, const char *name,
                         int flags)
{
    return make_call(worker, (struct file_call){.kind = CALL_OPEN,
                                                .flags = flags,
                                                .mode = batch->file_mode,
                                                .root = &batch->root,
                                                .name = name});
}

static bool close_file(struct worker *worker, const struct batch *batch, int fd)
{
    return call_file(worker, batch, CALL_CLOSE, fd, NULL, NULL, 0) == 0;
}

/* Stats a descriptor or, if that is -1, a name. */
static int64_t get_status(struct worker *worker, const struct batch *batch, int fd,
                          const char *name, struct file_status *status)
{
    return call_file(worker, batch, CALL_STAT, fd, name, status, sizeof *status);
}

static bool is_there(struct worker *worker, const struct batch *batch, const char *name)
{
    struct file_status status;
    return get_status(worker, batch, -1, name, &status) == 0 && status.is_regular;
}

/* Reads a block into its row, and decrypts it with the seal in `digests`; returns whether the file
   has exactly its length, and can be decrypted. */
static bool read_file(struct worker *worker, const struct batch *batch, size_t index, int fd)
{
    struct span span = {.fd = fd, .first = index, .num = 1, .pad_bytes = 1};
    batch->statuses[index] = 0;
    return move_rows(worker, batch, &span) == 0 && batch->statuses[index] == 0 &&
           span.moved_bytes == batch->memory.row_bytes;
}

/* Returns whether a value of the attribute, of this length, has the batch's prefix. */
static bool is_own(const struct batch *batch, const char *value, int64_t bytes)
{
    return bytes == (int64_t)(batch->value_prefix_bytes + batch->digest_bytes) &&
           memcmp(value, batch->value_prefix, batch->value_prefix_bytes) == 0;
}

/* Reads a block into its row; returns whether it is that of an attribute's value. */
static bool read_verified(struct worker *worker, const struct batch *batch, size_t index, int fd,
                          const char *value)
{
    value += batch->value_prefix_bytes;
    if (batch->bound != NULL)
        memcpy(digest_of(batch, index), value, batch->digest_bytes);
    return read_file(worker, batch, index, fd) &&
           memcmp(value, digest_of(batch, index), batch->digest_bytes) == 0;
}

static bool load_opened(struct worker *worker, const struct batch *batch, size_t index, int fd)
{
    const char *expected = batch->has_digests ? batch->expected[index] : NULL;
    if (expected != NULL && memcmp(expected, batch->value_prefix, batch->value_prefix_bytes) == 0 &&
        read_verified(worker, batch, index, fd, expected))
        return true;
    /* Read before the bytes, so that a concurrently overwritten file does not verify. */
    char value[MAX_VALUE_BYTES];
    int64_t bytes = call_file(worker, batch, CALL_GET_ATTRIBUTE, fd, batch->attribute, value,
                              sizeof value);
    if (!batch->has_digests)
        return (is_own(batch, value, bytes) || bytes == -ENODATA || bytes == -EOPNOTSUPP) &&
               read_file(worker, batch, index, fd);
    return is_own(batch, value, bytes) && read_verified(worker, batch, index, fd, value);
}

static int load_file(struct worker *worker, const struct batch *batch, size_t index)
{
    int64_t fd = open_file(worker, batch, batch->names[index], O_RDONLY);
    if (fd < 0)
        return STATUS_OTHERWISE;
    bool is_right = load_opened(worker, batch, index, (int)fd);
    return close_file(worker, batch, (int)fd) && is_right ? 0 : STATUS_OTHERWISE;
}

struct target { /* a file being written */
    int fd;
    int64_t size_bytes; /* of its former content */
};

/* Renames a victim, so that it cannot be opened under its old name. Returns 0 or a status. */
static int take_victim(struct worker *worker, const struct batch *batch, size_t index,
                       const char *temp)
{
    struct file_status status;
    const char *victim = batch->victims[index];
    int64_t result = get_status(worker, batch, -1, victim, &status);
    if (result != 0 || !status.is_regular)
        return result == -ENOENT || result == -ENOTDIR ? STATUS_VICTIM_GONE : STATUS_NOT_STORED;
    if (make_call(worker, (struct file_call){.kind = CALL_RENAME,
                                             .root = &batch->root,
                                             .name = victim,
                                             .target = temp}) != 0)
        return STATUS_NOT_STORED;
    batch->freed_bytes[index] = status.disk_bytes;
    return 0;
}

/* Opens a renamed victim if no reader can take its new bytes for its old block: readers of blocks
   without this kind of digest do not verify, and other names are unknown. An unverified reader
   creates the marker before it opens a file, so this must follow the rename. */
static bool open_victim(struct worker *worker, const struct batch *batch, const char *temp,
                        struct target *target)
{
    struct file_status status;
    char value[MAX_VALUE_BYTES];
    if (batch->marker[0] == '\0' || get_status(worker, batch, -1, batch->marker, &status) != -ENOENT)
        return false;
    int64_t fd = open_file(worker, batch, temp, O_RDWR);
    if (fd < 0)
        return false;
    *target = (struct target){(int)fd, 0};
    if (get_status(worker, batch, target->fd, NULL, &status) == 0 && status.num_links == 1 &&
        is_own(batch, value,
               call_file(worker, batch, CALL_GET_ATTRIBUTE, target->fd, batch->attribute, value,
                         sizeof value))) {
        target->size_bytes = status.size_bytes;
        return true;
    }
    close_file(worker, batch, target->fd);
    return false;
}

static bool fill_file(struct worker *worker, const struct batch *batch, size_t index,
                      const struct target *target)
{
    struct span span = {.fd = target->fd, .first = index, .num = 1};
    int64_t row_bytes = (int64_t)batch->memory.row_bytes;
    if (move_rows(worker, batch, &span) != 0)
        return false;
    if (target->size_bytes > row_bytes && call_file(worker, batch, CALL_TRUNCATE, target->fd, NULL,
                                                    NULL, batch->memory.row_bytes) != 0)
        return false;
    if (batch->has_digests) {
        char value[MAX_VALUE_BYTES];
        size_t prefix_bytes = batch->value_prefix_bytes;
        memcpy(value, batch->value_prefix, prefix_bytes);
        memcpy(value + prefix_bytes, digest_of(batch, index), batch->digest_bytes);
        if (call_file(worker, batch, CALL_SET_ATTRIBUTE, target->fd, batch->attribute, value,
                      prefix_bytes + batch->digest_bytes) != 0)
            return false;
    }
    return !batch->fsync || call_file(worker, batch, CALL_SYNC, target->fd, NULL, NULL, 0) == 0;
}

/* Writes and publishes a temporary file: the renamed victim, or a new one. */
static bool store_by_way_of(struct worker *worker, const struct batch *batch, size_t index,
                            const char *temp)
{
    struct target target = {-1, 0};
    if (batch->victims[index] == NULL || !open_victim(worker, batch, temp, &target)) {
        if (batch->victims[index] != NULL)
            call_file(worker, batch, CALL_UNLINK, -1, temp, NULL, 0);
        int64_t fd = open_file(worker, batch, temp, O_WRONLY | O_CREAT | O_EXCL);
        if (fd < 0)
            return false;
        target = (struct target){(int)fd, 0};
    }
    bool is_filled = fill_file(worker, batch, index, &target);
    if (!close_file(worker, batch, target.fd) || !is_filled)
        return false;
    struct file_status status = {0}; /* after closing, which frees preallocated space */
    if (batch->wants_disk_bytes && get_status(worker, batch, -1, temp, &status) != 0)
        return false;
    batch->disk_bytes[index] = status.disk_bytes;
    return make_call(worker, (struct file_call){.kind = CALL_PUBLISH,
                                                .root = &batch->root,
                                                .name = temp,
                                                .target = batch->names[index]}) == 0;
}

static int store_file(struct worker *worker, const struct batch *batch, size_t index)
{
    char temp[MAX_NAME_BYTES];
    unsigned long long serial = batch->first_serial + index;
    if (is_there(worker, batch, batch->names[index]))
        return STATUS_PRESENT;
    if (!batch->may_write[index] ||
        snprintf(temp, sizeof temp, "%s%s%llu.tmp", batch->names[index], batch->temp_stem, serial) >=
            (int)sizeof temp)
        return STATUS_NOT_STORED;
    int status = batch->victims[index] == NULL ? 0 : take_victim(worker, batch, index, temp);
    if (status != 0 || store_by_way_of(worker, batch, index, temp))
        return status;
    call_file(worker, batch, CALL_UNLINK, -1, temp, NULL, 0);
    return STATUS_NOT_STORED;
}

/* -- parts -------------------------------------------------------------------------------------- */

static size_t bytes_of(const struct copy *copy)
{
    return (size_t)copy->bytes * (size_t)copy->count;
}

/* Prefetches the beginning of a fragment, which the processor does not foresee. */
static void prefetch(const unsigned char *target, const unsigned char *source, int64_t bytes)
{
    for (size_t at = 0; at < least((size_t)bytes, PREFETCHED_BYTES); at += LINE_BYTES) {
        __builtin_prefetch(source + at);
        __builtin_prefetch(target + at, 1);
    }
}

/* Copies fragments; `next` is the copy that follows, or NULL. */
static void move_fragments(const struct batch *batch, const struct copy *copy,
                           const struct copy *next)
{
    unsigned char *target = batch->memory.base + copy->target;
    const unsigned char *source = batch->source + copy->source;
    int64_t to = copy->target_stride, from = copy->source_stride;
    for (int64_t i = 0; i < copy->count; i++) {
        if (i + 1 < copy->count)
            prefetch(target + (i + 1) * to, source + (i + 1) * from, copy->bytes);
        else if (next != NULL)
            prefetch(batch->memory.base + next->target, batch->source + next->source, next->bytes);
        memmove(target + i * to, source + i * from, (size_t)copy->bytes);
    }
}

void do_part(struct worker *worker, const struct part *part)
{
    struct batch *batch = part->batch;
    if (batch->kind == BATCH_EXTENTS)
        move_extents(worker, part);
    bool is_file = batch->kind == BATCH_LOAD_FILES || batch->kind == BATCH_STORE_FILES;
    if (is_file && call_file(worker, batch, CALL_CHECK_ROOT, -1, NULL, NULL, 0) != 0) {
        int status = batch->is_store ? STATUS_NOT_STORED : STATUS_OTHERWISE;
        memset(batch->statuses + part->first, status, part->count);
        return;
    }
    for (size_t i = part->first; i < part->first + part->count; i++) {
        if (batch->kind == BATCH_LOAD_FILES) {
            batch->statuses[i] = (unsigned char)load_file(worker, batch, i);
        } else if (batch->kind == BATCH_STORE_FILES) {
            batch->statuses[i] = (unsigned char)store_file(worker, batch, i);
        } else if (batch->kind == BATCH_HAS_FILES) {
            batch->statuses[i] = is_there(worker, batch, batch->names[i]) ? STATUS_THERE : 0;
        } else if (batch->kind == BATCH_COPIES) {
            const struct copy *copy = &batch->copies[i];
            bool is_last = i + 1 == part->first + part->count;
            move_fragments(batch, copy, is_last ? NULL : copy + 1);
            count_up(worker->engine, BYTES, bytes_of(copy));
        }
    }
    close_folders(&worker->folders);
}

void cancel_part(const struct part *part)
{
    enum batch_kind kind = part->batch->kind;
    int status = kind == BATCH_LOAD_FILES || kind == BATCH_STORE_FILES ? STATUS_NOT_BEGUN
                 : kind == BATCH_HAS_FILES                             ? 0
                                                                       : ECANCELED;
    memset(part->batch->statuses + part->first, status, part->count);
}

void cut_batch(struct batch *batch, size_t part_bytes)
{
    bool has_files = batch->kind == BATCH_EXTENTS && batch->is_store;
    size_t run = 0, skip = 0, bytes = 0;
    struct part *part = batch->parts;
    *part = (struct part){.batch = batch, .file = -1}; /* an empty part, ends like others */
    for (size_t i = 0; i < batch->count; i++, skip++) {
        if (batch->kind == BATCH_EXTENTS && skip == (size_t)batch->runs[run].length) {
            run++;
            skip = 0;
        }
        int64_t file = has_files ? batch->runs[run].fd : -1;
        size_t cost = batch->kind == BATCH_HAS_FILES ? part_bytes / NAMES_PER_PART
                      : batch->kind == BATCH_COPIES  ? bytes_of(&batch->copies[i])
                                                     : batch->memory.slot_bytes;
        if (i == 0 || part->file != file || bytes + cost > part_bytes) {
            part += i > 0;
            *part = (struct part){batch, NULL, i, 0, run, skip, file};
            bytes = 0;
        }
        part->count++;
        bytes += cost;
    }
    batch->num_parts = (size_t)(part - batch->parts) + 1;
}

/* -- the system's own calls --------------------------------------------------------------------- */

static int close_failed(int fd)
{
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Opens a path component by component. */
static int open_by_components(int root_fd, const char *name, int flags)
{
    char component[MAX_NAME_BYTES];
    for (int folder_fd = root_fd;;) {
        int bytes = (int)strcspn(name, "/");
        bool is_last = name[bytes] == '\0';
        snprintf(component, sizeof component, "%.*s", bytes, name);
        int fd = openat(folder_fd, component,
                        is_last ? flags | O_NOFOLLOW : O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (folder_fd != root_fd)
            close_failed(folder_fd);
        if (is_last || fd == -1)
            return fd;
        folder_fd = fd;
        name += bytes + 1;
    }
}

static int open_beneath(int root_fd, const char *name, int flags)
{
    uint64_t how[] = {(unsigned int)flags, 0, RESOLVE_NOTHING_ELSE}; /* as `struct open_how` */
    int fd = (int)syscall(OPENAT2, root_fd, name, how, sizeof how);
    if (fd == -1 && (errno == ENOSYS || errno == EPERM)) /* an old kernel, or seccomp */
        return open_by_components(root_fd, name, flags);
    return fd;
}

void close_folders(struct folders *folders)
{
    for (int i = 0; i < KEPT_FOLDERS; i++) {
        if (folders->kept[i].fd != -1)
            close(folders->kept[i].fd);
        folders->kept[i].fd = -1;
    }
}

/* Returns the folder of a name, open until others have replaced it, and the name in it. */
static int open_folder(const struct file_call *call, const char *name, const char **leaf)
{
    const char *slash = strrchr(name, '/');
    *leaf = slash == NULL ? name : slash + 1;
    if (slash == NULL)
        return call->root->fd;
    size_t bytes = (size_t)(slash - name);
    for (int i = 0; i < KEPT_FOLDERS; i++) {
        const struct folder *kept = &call->folders->kept[i];
        if (kept->fd != -1 && strncmp(kept->name, name, bytes) == 0 && kept->name[bytes] == '\0')
            return kept->fd;
    }
    struct folder *folder = &call->folders->kept[call->folders->next++ % KEPT_FOLDERS];
    if (folder->fd != -1)
        close(folder->fd);
    memcpy(folder->name, name, bytes);
    folder->name[bytes] = '\0';
    folder->fd = open_beneath(call->root->fd, folder->name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return folder->fd;
}

/* Sets a new file's permissions regardless of the umask. Permissions derived from the folder are
   for the folder's group: a file of another group is changed to it, or loses group permissions. */
static int give_mode(int fd, int mode, const struct stat *folder, bool is_given)
{
    struct stat made;
    if (fstat(fd, &made) != 0)
        return -1;
    if ((mode & S_IRWXG) && made.st_gid != folder->st_gid && !is_given &&
        fchown(fd, (uid_t)-1, folder->st_gid) != 0)
        mode &= ~S_IRWXG;
    if (fchmod(fd, (mode_t)mode) == 0)
        return 0;
    return errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -1; /* as on vfat */
}

static int create_file(const struct file_call *call, int flags)
{
    const char *leaf;
    struct stat folder;
    int folder_fd = open_folder(call, call->name, &leaf), mode = call->mode;
    if (folder_fd == -1 || fstat(folder_fd, &folder) != 0)
        return -1;
    if (mode == -1) {
        bool is_everybodys = (folder.st_mode & S_IWOTH) && !(folder.st_mode & S_ISVTX);
        mode = 0600 | (int)(folder.st_mode & (is_everybodys ? 0066 : 0060));
    }
    int fd = openat(folder_fd, leaf, flags, (mode_t)mode);
    if (fd != -1 && (mode & 0077) && give_mode(fd, mode, &folder, call->mode != -1) != 0)
        return close_failed(fd);
    return fd;
}

static int open_existing(const struct file_call *call, int flags)
{
    struct stat status;
    const char *leaf;
    int fd;
    if ((flags & O_ACCMODE) == O_RDONLY) {
        fd = open_beneath(call->root->fd, call->name, flags);
    } else { /* a store, which has used the folder before */
        fd = open_folder(call, call->name, &leaf);
        fd = fd == -1 ? -1 : openat(fd, leaf, flags);
    }
    if (fd == -1 || (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)))
        return fd;
    errno = ENXIO;
    return close_failed(fd);
}

static int get_file_status(const struct file_call *call)
{
    struct stat found;
    const char *leaf;
    int folder_fd = call->fd == -1 ? open_folder(call, call->name, &leaf) : -1;
    if (call->fd == -1 && folder_fd == -1)
        return -1;
    if (call->fd == -1 ? fstatat(folder_fd, leaf, &found, AT_SYMLINK_NOFOLLOW)
                       : fstat(call->fd, &found))
        return -1;
    struct file_status status = {S_ISREG(found.st_mode), (int64_t)found.st_blocks * 512,
                                 (int64_t)found.st_size, (int64_t)found.st_nlink};
    memcpy(call->buffers->iov_base, &status, sizeof status);
    return 0;
}

static int check_root(const struct root *root)
{
    struct stat found, opened;
    if (stat(root->path, &found) != 0 || fstat(root->fd, &opened) != 0)
        return -1;
    errno = ESTALE;
    return found.st_dev == opened.st_dev && found.st_ino == opened.st_ino ? 0 : -1;
}

/* Unlinks or renames a name. */
static int call_on_name(const struct file_call *call)
{
    const char *leaf, *target;
    int folder_fd = open_folder(call, call->name, &leaf);
    if (folder_fd == -1)
        return -1;
    if (call->kind == CALL_UNLINK)
        return unlinkat(folder_fd, leaf, 0);
    int target_fd = open_folder(call, call->target, &target);
    if (target_fd == -1)
        return -1;
    return (int)syscall(SYS_renameat2, folder_fd, leaf, target_fd, target,
                        call->kind == CALL_PUBLISH ? NOREPLACE : 0);
}

static int64_t call_system(const struct file_call *call)
{
    const struct iovec *buffers = call->buffers;
    int flags = call->flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, num = (int)call->num_buffers;
    switch (call->kind) {
    case CALL_OPEN:
        return flags & O_CREAT ? create_file(call, flags) : open_existing(call, flags);
    case CALL_CLOSE:
        return close(call->fd);
    case CALL_READ:
        return preadv(call->fd, buffers, num, call->offset);
    case CALL_WRITE:
        return pwritev(call->fd, buffers, num, call->offset);
    case CALL_GET_ATTRIBUTE:
        return fgetxattr(call->fd, call->name, buffers->iov_base, buffers->iov_len);
    case CALL_SET_ATTRIBUTE:
        return fsetxattr(call->fd, call->name, buffers->iov_base, buffers->iov_len, 0);
    case CALL_TRUNCATE:
        return ftruncate(call->fd, call->offset);
    case CALL_SYNC:
        return fsync(call->fd);
    case CALL_STAT:
        return get_file_status(call);
    case CALL_CHECK_ROOT:
        return check_root(call->root);
    default:
        return call_on_name(call);
    }
}

int64_t make_system_call(const struct file_call *call)
{
    int64_t result = call_system(call);
    return result == -1 ? -errno : result;
}
