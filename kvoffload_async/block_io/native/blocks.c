/* What a thread does with a part of a batch, and the system's own calls.

   Threads: everything here runs in a thread of the engine, which has the part to itself, but for
   cut_batch and cancel_part (the owner's thread) and hashes_are_right (any).

   Ownership: what is opened here is closed here, before the part ends. A digest is computed piece
   by piece while a piece is in the processor's cache: before it is written, after it was read. */

#include "block_io.h"

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
    MAX_PIECE_BLOCKS = 64,
    NAMES_PER_PART = 16,
    RESOLVE_NOTHING_ELSE = 0x02 | 0x04 | 0x08, /* no magic links, no links, beneath */
    OPENAT2 = 437,                             /* on every architecture but Alpha */
    NOREPLACE = 1,
    MAX_INTERRUPTIONS = 64, /* of one call: its threads block signals, so that there should be none */
};

static const unsigned char zeros[MAX_PAD_BYTES];

static void count(_Atomic uint64_t *counter, uint64_t more)
{
    atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

/* -- digests ------------------------------------------------------------------------------------ */

static void put_big_endian(unsigned char *target, uint64_t number)
{
    for (int i = 7; i >= 0; i--, number >>= 8)
        target[i] = (unsigned char)number;
}

static void put_digest(unsigned char *target, struct hash128 hash)
{
    put_big_endian(target, hash.high);
    put_big_endian(target + 8, hash.low);
}

bool hashes_are_right(const struct hashes *hashes)
{
    static const struct {
        size_t bytes;
        uint64_t seed;
        struct hash128 hash;
    } golden[] = {
        {0, 0x0000000000000000u, {0x6001c324468d497fu, 0x99aa06d3014798d8u}},
        {3, 0x0000000000000001u, {0x09b2077206b1496du, 0x2121b83120ce5cb7u}},
        {16, 0xffffffffffffffffu, {0xc9a84b369524206eu, 0xe76df6ee9e1eb817u}},
        {200, 0x0123456789abcdefu, {0x59e68c35a8ce583fu, 0xf7e703f51d16f85du}},
        {241, 0xfedcba9876543210u, {0x9496d69ce0b7b343u, 0x428971e3a718aa4au}},
        {3000, 0xfedcba9876543210u, {0x190efe49af0be58cu, 0x16988cda9ea44600u}},
    };
    unsigned char data[3000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 131 + 7);
    if (hashes->hash64(data, 100) != 0x5da67eac6d4093d5u)
        return false;
    void *state = hashes->create_state();
    bool is_right = state != NULL;
    for (size_t i = 0; i < sizeof golden / sizeof *golden && is_right; i++) {
        size_t half = golden[i].bytes / 2;
        struct hash128 whole = hashes->hash128(data, golden[i].bytes, golden[i].seed);
        hashes->reset(state, golden[i].seed);
        hashes->update(state, data, half);
        hashes->update(state, data + half, golden[i].bytes - half);
        struct hash128 pieces = hashes->digest(state);
        is_right = whole.low == golden[i].hash.low && whole.high == golden[i].hash.high &&
                   pieces.low == whole.low && pieces.high == whole.high;
    }
    if (state != NULL)
        hashes->free_state(state);
    return is_right;
}

/* -- calls -------------------------------------------------------------------------------------- */

/* Makes a call, again if a signal interrupted it; while it lasts, it can be seen to hang. */
static int64_t make_call(struct worker *worker, struct file_call call)
{
    int64_t result;
    int times = 0;
    call.folder = &worker->folder;
    do {
        atomic_store_explicit(&worker->in_call_since_ns, monotonic_ns(), memory_order_relaxed);
        result = worker->files->make(worker->files->self, &call);
        atomic_store_explicit(&worker->in_call_since_ns, 0, memory_order_relaxed);
        count(&worker->counters->system_calls, 1);
    } while (result == -EINTR && call.kind != CALL_CLOSE && ++times < MAX_INTERRUPTIONS);
    return result == -EINTR && call.kind == CALL_CLOSE ? 0 : result; /* closed nevertheless */
}

/* Moves buffers, in as many calls as it takes to move `needed` bytes. Returns the bytes, which are
   fewer only if a file that is read ends, or -errno. The buffers are changed. */
static int64_t transfer(struct worker *worker, enum call_kind kind, int fd, struct iovec *buffers,
                        int num_buffers, int64_t offset, int64_t needed)
{
    int64_t done = 0;
    count(&worker->counters->pieces, 1);
    while (done < needed) {
        int64_t moved = make_call(worker, (struct file_call){.kind = kind,
                                                             .fd = fd,
                                                             .buffers = buffers,
                                                             .num_buffers = num_buffers,
                                                             .offset = offset + done});
        if (moved < 0)
            return moved;
        if (moved == 0)
            return kind == CALL_WRITE ? -EIO : done;
        done += moved;
        while (num_buffers > 0 && (size_t)moved >= buffers->iov_len) {
            moved -= (int64_t)buffers->iov_len;
            buffers++;
            num_buffers--;
        }
        if (num_buffers > 0) {
            buffers->iov_base = (char *)buffers->iov_base + moved;
            buffers->iov_len -= (size_t)moved;
        }
    }
    count(&worker->counters->bytes, (uint64_t)done);
    return done;
}

static unsigned char *row_of(const struct batch *batch, size_t index)
{
    return batch->memory.base + (size_t)batch->rows[index] * batch->memory.row_bytes;
}

struct row_transfer { /* of one row, piece by piece */
    enum call_kind kind;
    int fd;
    int64_t offset;
    struct iovec tail; /* behind the row: moved with its last piece; not needed of what is read */
};

/* Returns 0, ENDED_EARLY or an errno; what of the tail was moved, in `tail.iov_len`. */
static int move_row(struct worker *worker, const struct batch *batch, size_t index,
                    struct row_transfer *move, unsigned char *digest)
{
    const struct hashes *hashes = worker->hashes;
    unsigned char *row = row_of(batch, index);
    size_t row_bytes = batch->memory.row_bytes, piece_bytes = worker->limits->piece_bytes;
    bool is_write = move->kind == CALL_WRITE, is_whole = row_bytes <= piece_bytes;
    bool is_hashed = digest != NULL;
    struct hash128 hash = {0, 0};
    if (is_hashed && !is_whole)
        hashes->reset(worker->hash_state, batch->seeds[index]);
    for (size_t at = 0; at < row_bytes; at += piece_bytes) {
        size_t bytes = row_bytes - at < piece_bytes ? row_bytes - at : piece_bytes;
        bool is_last = at + bytes == row_bytes;
        struct iovec buffers[2] = {{row + at, bytes}, move->tail};
        size_t tail_bytes = is_last ? move->tail.iov_len : 0;
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) != is_write) { /* moves second if it writes */
                size_t needed = is_write ? bytes + tail_bytes : bytes;
                int64_t moved = transfer(worker, move->kind, move->fd, buffers, 1 + (tail_bytes > 0),
                                         move->offset + (int64_t)at, (int64_t)needed);
                if (moved < (int64_t)bytes)
                    return moved < 0 ? (int)-moved : ENDED_EARLY;
                if (is_last)
                    move->tail.iov_len = (size_t)moved - bytes;
            } else if (is_hashed && is_whole) {
                hash = hashes->hash128(row, bytes, batch->seeds[index]);
            } else if (is_hashed) {
                hashes->update(worker->hash_state, row + at, bytes);
            }
        }
    }
    if (is_hashed) {
        put_digest(digest, is_whole ? hash : hashes->digest(worker->hash_state));
        count(&worker->counters->hashed_bytes, row_bytes);
    }
    return 0;
}

static unsigned char *digest_of(const struct batch *batch, size_t index)
{
    return batch->seeds == NULL ? NULL : batch->digests + index * DIGEST_BYTES;
}

/* -- extents ------------------------------------------------------------------------------------ */

static void hash_rows(struct worker *worker, const struct batch *batch, size_t first, size_t num)
{
    if (batch->seeds == NULL)
        return;
    for (size_t i = first; i < first + num; i++) {
        put_digest(digest_of(batch, i), worker->hashes->hash128(row_of(batch, i),
                                                                batch->memory.row_bytes,
                                                                batch->seeds[i]));
    }
    count(&worker->counters->hashed_bytes, num * batch->memory.row_bytes);
}

/* Moves several small blocks that lie behind each other in one call; returns 0 or an errno. */
static int move_blocks(struct worker *worker, const struct batch *batch, size_t first, size_t num)
{
    struct iovec buffers[2 * MAX_PIECE_BLOCKS];
    size_t row_bytes = batch->memory.row_bytes;
    size_t pad_bytes = batch->memory.slot_bytes - row_bytes;
    size_t total = num * batch->memory.slot_bytes;
    const struct place *place = &batch->places[first];
    void *pad = batch->is_store ? (void *)(uintptr_t)zeros : worker->scratch;
    int num_buffers = 0;
    for (size_t i = first; i < first + num; i++) {
        buffers[num_buffers++] = (struct iovec){row_of(batch, i), row_bytes};
        if (pad_bytes > 0)
            buffers[num_buffers++] = (struct iovec){pad, pad_bytes};
    }
    if (batch->is_store)
        hash_rows(worker, batch, first, num);
    int64_t moved = transfer(worker, batch->is_store ? CALL_WRITE : CALL_READ, place->fd, buffers,
                             num_buffers, place->offset,
                             (int64_t)(batch->is_store ? total : total - pad_bytes));
    if (moved < 0)
        return (int)-moved;
    size_t num_whole = ((size_t)moved + pad_bytes) / batch->memory.slot_bytes;
    if (num_whole > num)
        num_whole = num;
    for (size_t i = first + num_whole; i < first + num; i++)
        batch->errors[i] = ENDED_EARLY;
    if (!batch->is_store)
        hash_rows(worker, batch, first, num_whole);
    return 0;
}

static int move_large_block(struct worker *worker, const struct batch *batch, size_t index)
{
    size_t pad_bytes = batch->memory.slot_bytes - batch->memory.row_bytes;
    const struct place *place = &batch->places[index];
    struct row_transfer move = {batch->is_store ? CALL_WRITE : CALL_READ, place->fd, place->offset,
                                {(void *)(uintptr_t)zeros, batch->is_store ? pad_bytes : 0}};
    int error = move_row(worker, batch, index, &move, digest_of(batch, index));
    if (error == ENDED_EARLY) {
        batch->errors[index] = ENDED_EARLY;
        return 0;
    }
    return error;
}

static void move_extents(struct worker *worker, const struct part *part)
{
    const struct batch *batch = part->batch;
    size_t slot_bytes = batch->memory.slot_bytes, end = part->first + part->count;
    size_t most = worker->limits->piece_bytes / slot_bytes;
    if (most > MAX_PIECE_BLOCKS)
        most = MAX_PIECE_BLOCKS;
    for (size_t i = part->first; i < end;) {
        int run = batch->places[i].run, error;
        size_t num = 1;
        if (most == 0) {
            error = move_large_block(worker, batch, i);
        } else {
            while (num < most && i + num < end && batch->places[i + num].run == run)
                num++;
            error = move_blocks(worker, batch, i, num);
        }
        if (error == 0) {
            i += num;
        } else {
            for (; i < end && batch->places[i].run == run; i++)
                batch->errors[i] = error;
        }
    }
}

/* -- files -------------------------------------------------------------------------------------- */

static int64_t call_file(struct worker *worker, const struct batch *batch, enum call_kind kind,
                         const char *name, const char *target)
{
    return make_call(worker, (struct file_call){.kind = kind,
                                                .fd = -1,
                                                .root = &batch->root,
                                                .name = name,
                                                .target = target});
}

static int64_t call_fd(struct worker *worker, enum call_kind kind, int fd, int64_t offset)
{
    return make_call(worker, (struct file_call){.kind = kind, .fd = fd, .offset = offset});
}

static bool get_status(struct worker *worker, const struct batch *batch, int fd, const char *name,
                       struct file_status *status)
{
    return make_call(worker, (struct file_call){.kind = CALL_STAT,
                                                .fd = fd,
                                                .root = &batch->root,
                                                .name = name,
                                                .value = status,
                                                .value_bytes = sizeof *status}) == 0;
}

static bool is_there(struct worker *worker, const struct batch *batch, const char *name)
{
    struct file_status status;
    return get_status(worker, batch, -1, name, &status) && status.is_regular;
}

/* Reads a block into its row; tells whether it is whole, and no longer than that. */
static bool read_file(struct worker *worker, const struct batch *batch, size_t index, int fd)
{
    bool is_direct = (batch->open_flags & O_DIRECT) != 0; /* behind the end it is not aligned */
    struct row_transfer move = {CALL_READ, fd, 0, {worker->scratch, is_direct ? 0 : 1}};
    if (is_direct) {
        struct file_status status;
        if (!get_status(worker, batch, fd, NULL, &status) ||
            status.size_bytes != (int64_t)batch->memory.row_bytes)
            return false;
    }
    return move_row(worker, batch, index, &move, digest_of(batch, index)) == 0 &&
           move.tail.iov_len == 0;
}

static bool is_digest(const struct batch *batch, size_t index, const void *value, int64_t bytes)
{
    size_t prefix_bytes = batch->value_prefix_bytes;
    return bytes == (int64_t)prefix_bytes + DIGEST_BYTES &&
           memcmp(value, batch->value_prefix, prefix_bytes) == 0 &&
           memcmp((const char *)value + prefix_bytes, digest_of(batch, index), DIGEST_BYTES) == 0;
}

static bool load_opened(struct worker *worker, const struct batch *batch, size_t index, int fd)
{
    if (batch->seeds == NULL)
        return read_file(worker, batch, index, fd);
    const struct known_value *known = &batch->expected[index];
    if (known->data != NULL && read_file(worker, batch, index, fd) &&
        is_digest(batch, index, known->data, (int64_t)known->bytes))
        return true;
    /* Before the bytes: of a file that is overwritten meanwhile, they must not match. */
    unsigned char value[MAX_VALUE_BYTES];
    int64_t bytes = make_call(worker, (struct file_call){.kind = CALL_GET_ATTRIBUTE,
                                                         .fd = fd,
                                                         .name = batch->attribute,
                                                         .value = value,
                                                         .value_bytes = sizeof value});
    return bytes >= 0 && read_file(worker, batch, index, fd) &&
           is_digest(batch, index, value, bytes);
}

static bool load_file(struct worker *worker, const struct batch *batch, size_t index)
{
    int64_t fd = make_call(worker, (struct file_call){.kind = CALL_OPEN,
                                                      .root = &batch->root,
                                                      .name = batch->names[index],
                                                      .flags = O_RDONLY | batch->open_flags});
    if (fd < 0)
        return false;
    bool is_right = load_opened(worker, batch, index, (int)fd);
    return call_fd(worker, CALL_CLOSE, (int)fd, 0) == 0 && is_right;
}

static bool fill_file(struct worker *worker, const struct batch *batch, size_t index, int fd)
{
    unsigned char value[MAX_VALUE_BYTES], *digest = digest_of(batch, index);
    struct row_transfer move = {CALL_WRITE, fd, 0, {NULL, 0}};
    if (move_row(worker, batch, index, &move, digest) != 0)
        return false;
    if (batch->recycled[index] &&
        call_fd(worker, CALL_TRUNCATE, fd, (int64_t)batch->memory.row_bytes) != 0)
        return false;
    if (digest != NULL) {
        memcpy(value, batch->value_prefix, batch->value_prefix_bytes);
        memcpy(value + batch->value_prefix_bytes, digest, DIGEST_BYTES);
        if (make_call(worker,
                      (struct file_call){.kind = CALL_SET_ATTRIBUTE,
                                         .fd = fd,
                                         .name = batch->attribute,
                                         .value = value,
                                         .value_bytes = batch->value_prefix_bytes + DIGEST_BYTES}))
            return false;
    }
    return !batch->fsync || call_fd(worker, CALL_SYNC, fd, 0) == 0;
}

static bool store_by_way_of(struct worker *worker, const struct batch *batch, size_t index)
{
    const char *temp = batch->temps[index], *name = batch->names[index];
    int create = batch->recycled[index] ? 0 : O_CREAT | O_EXCL;
    int64_t fd = make_call(worker,
                           (struct file_call){.kind = CALL_OPEN,
                                              .root = &batch->root,
                                              .name = temp,
                                              .flags = O_WRONLY | create | batch->open_flags,
                                              .mode = batch->file_mode});
    if (fd < 0)
        return false;
    bool is_filled = fill_file(worker, batch, index, (int)fd);
    if (call_fd(worker, CALL_CLOSE, (int)fd, 0) != 0 || !is_filled)
        return false;
    struct file_status status = {0}; /* once it is closed: what was allocated ahead is gone then */
    if (batch->wants_disk_bytes && !get_status(worker, batch, -1, temp, &status))
        return false;
    batch->disk_bytes[index] = status.disk_bytes;
    return call_file(worker, batch, CALL_PUBLISH, temp, name) == 0;
}

static int store_file(struct worker *worker, const struct batch *batch, size_t index)
{
    enum { WRITTEN, PRESENT, OTHERWISE };
    if (is_there(worker, batch, batch->names[index]))
        return PRESENT;
    if (store_by_way_of(worker, batch, index))
        return WRITTEN;
    call_file(worker, batch, CALL_UNLINK, batch->temps[index], NULL);
    return OTHERWISE;
}

static void copy_bytes(struct worker *worker, const struct batch *batch, size_t index)
{
    const struct copy *copy = &batch->copies[index];
    memmove(batch->memory.base + copy->target, batch->source.base + copy->source,
            (size_t)copy->bytes);
    count(&worker->counters->bytes, (uint64_t)copy->bytes);
}

/* -- parts -------------------------------------------------------------------------------------- */

void do_part(struct worker *worker, const struct part *part)
{
    struct batch *batch = part->batch;
    if (batch->kind == BATCH_EXTENTS)
        move_extents(worker, part);
    for (size_t i = part->first; i < part->first + part->count; i++) {
        switch (batch->kind) {
        case BATCH_EXTENTS:
            break;
        case BATCH_LOAD_FILES:
            batch->statuses[i] = !load_file(worker, batch, i);
            break;
        case BATCH_STORE_FILES:
            batch->statuses[i] = (unsigned char)store_file(worker, batch, i);
            break;
        case BATCH_HAS_FILES:
            batch->statuses[i] = is_there(worker, batch, batch->names[i]);
            break;
        case BATCH_COPIES:
            copy_bytes(worker, batch, i);
            break;
        }
    }
    close_folder(&worker->folder);
}

void cancel_part(struct part *part)
{
    struct batch *batch = part->batch;
    batch->is_cancelled = true;
    for (size_t i = part->first; i < part->first + part->count; i++) {
        if (batch->errors != NULL)
            batch->errors[i] = ECANCELED;
        if (batch->statuses != NULL)
            batch->statuses[i] = batch->kind == BATCH_HAS_FILES ? 0 : OUTCOME_CANCELLED;
    }
}

static size_t cost_of(const struct batch *batch, size_t index, const struct limits *limits)
{
    switch (batch->kind) {
    case BATCH_HAS_FILES:
        return limits->part_bytes / NAMES_PER_PART;
    case BATCH_COPIES:
        return (size_t)batch->copies[index].bytes;
    default:
        return batch->memory.slot_bytes;
    }
}

bool cut_batch(struct batch *batch, const struct limits *limits)
{
    batch->num_parts = 0;
    batch->parts = calloc(batch->count + 1, sizeof *batch->parts);
    if (batch->parts == NULL)
        return false;
    size_t part_bytes = 0;
    struct part *part = NULL;
    for (size_t i = 0; i < batch->count; i++) {
        int file = batch->kind == BATCH_EXTENTS && batch->is_store ? batch->places[i].fd : -1;
        size_t cost = cost_of(batch, i, limits);
        if (part == NULL || part->file != file || part_bytes + cost > limits->part_bytes) {
            part = &batch->parts[batch->num_parts++];
            *part = (struct part){.batch = batch, .first = i, .file = file};
            part_bytes = 0;
        }
        part->count++;
        part_bytes += cost;
    }
    return true;
}

/* -- the system's own calls --------------------------------------------------------------------- */

struct open_request { /* `struct open_how`, which older headers lack */
    uint64_t flags;
    uint64_t mode;
    uint64_t resolve;
};

static int open_by_kernel(int root_fd, const char *name, int flags)
{
    struct open_request how = {(uint64_t)(unsigned int)flags, 0, RESOLVE_NOTHING_ELSE};
    return (int)syscall(OPENAT2, root_fd, name, &how, sizeof how);
}

/* One folder after the other, where `openat2` does not exist or is not allowed. */
static int open_by_components(int root_fd, const char *name, int flags)
{
    char component[256];
    int folder_fd = root_fd;
    for (;;) {
        size_t bytes = strcspn(name, "/");
        bool is_last = name[bytes] == '\0';
        if (bytes == 0 || bytes >= sizeof component) {
            errno = bytes == 0 ? EINVAL : ENAMETOOLONG;
            break;
        }
        snprintf(component, sizeof component, "%.*s", (int)bytes, name);
        int fd = openat(folder_fd, component,
                        is_last ? flags | O_NOFOLLOW : O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (folder_fd != root_fd) {
            int error = errno;
            close(folder_fd);
            errno = error;
        }
        if (is_last || fd == -1)
            return fd;
        folder_fd = fd;
        name += bytes + 1;
    }
    if (folder_fd != root_fd)
        close(folder_fd);
    return -1;
}

static int open_beneath(int root_fd, const char *name, int flags)
{
    static _Atomic int has_openat2 = -1; /* not known; filters of system calls forbid what is new */
    int has = atomic_load_explicit(&has_openat2, memory_order_relaxed);
    if (has == -1) {
        int fd = open_by_kernel(root_fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
        has = fd != -1;
        if (fd != -1)
            close(fd);
        atomic_store_explicit(&has_openat2, has, memory_order_relaxed);
    }
    return has ? open_by_kernel(root_fd, name, flags) : open_by_components(root_fd, name, flags);
}

void close_folder(struct folder *folder)
{
    if (folder->fd != -1)
        close(folder->fd);
    folder->fd = -1;
}

/* Returns the folder of a name, which stays open until another is needed, and the name in it. */
static int open_folder(const struct file_call *call, const char **leaf)
{
    char name[4096];
    struct folder *folder = call->folder;
    const char *slash = strrchr(call->name, '/');
    *leaf = slash == NULL ? call->name : slash + 1;
    if (slash == NULL)
        return call->root->fd;
    size_t bytes = (size_t)(slash - call->name);
    if (folder->fd != -1 && folder->root == call->root && folder->name_bytes == bytes &&
        memcmp(folder->name, call->name, bytes) == 0)
        return folder->fd;
    if (bytes >= sizeof name) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(name, call->name, bytes);
    name[bytes] = '\0';
    close_folder(folder);
    folder->fd = open_beneath(call->root->fd, name, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    folder->root = call->root;
    folder->name = call->name;
    folder->name_bytes = bytes;
    return folder->fd;
}

/* Gives a new file its permissions, whatever the umask is. Where they follow from the folder they
   are meant for the folder's group: a file of another gets that, or else nothing for its own. */
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
    return errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -1; /* as vfat */
}

static int create_file(const struct file_call *call, int flags)
{
    const char *leaf;
    struct stat folder;
    int folder_fd = open_folder(call, &leaf), mode = call->mode;
    if (folder_fd == -1 || fstat(folder_fd, &folder) != 0)
        return -1;
    if (mode == -1) {
        bool is_everybodys = (folder.st_mode & S_IWOTH) && !(folder.st_mode & S_ISVTX);
        mode = 0600 | (int)(folder.st_mode & (is_everybodys ? 0066 : 0060));
    }
    int fd = openat(folder_fd, leaf, flags, (mode_t)mode);
    if (fd != -1 && (mode & 0077) && give_mode(fd, mode, &folder, call->mode != -1) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static int open_existing(const struct file_call *call, int flags)
{
    struct stat status;
    int fd = open_beneath(call->root->fd, call->name, flags);
    if (fd == -1)
        return -1;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode))
        return fd;
    close(fd);
    errno = ENXIO;
    return -1;
}

static int get_stat(const struct file_call *call)
{
    const char *leaf;
    struct stat found;
    int folder_fd = call->fd;
    if (folder_fd == -1) {
        folder_fd = open_folder(call, &leaf);
        if (folder_fd == -1 || fstatat(folder_fd, leaf, &found, AT_SYMLINK_NOFOLLOW) != 0)
            return -1;
    } else if (fstat(folder_fd, &found) != 0) {
        return -1;
    }
    *(struct file_status *)call->value = (struct file_status){S_ISREG(found.st_mode), (int64_t)found.st_size,
                                         (int64_t)found.st_blocks * 512};
    return 0;
}

static int change_name(const struct file_call *call)
{
    const char *leaf;
    int folder_fd = open_folder(call, &leaf);
    if (folder_fd == -1 || call->kind == CALL_UNLINK)
        return folder_fd == -1 ? -1 : unlinkat(folder_fd, leaf, 0);
    const char *new_leaf = call->target + (leaf - call->name); /* the same folder: checked before */
    return (int)syscall(SYS_renameat2, folder_fd, leaf, folder_fd, new_leaf, NOREPLACE);
}

int64_t make_system_call(void *self, const struct file_call *call)
{
    (void)self;
    int flags = call->flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int64_t result = -1;
    switch (call->kind) {
    case CALL_OPEN:
        result = call->flags & O_CREAT ? create_file(call, flags) : open_existing(call, flags);
        break;
    case CALL_CLOSE:
        result = close(call->fd);
        break;
    case CALL_READ:
        result = preadv(call->fd, call->buffers, call->num_buffers, call->offset);
        break;
    case CALL_WRITE:
        result = pwritev(call->fd, call->buffers, call->num_buffers, call->offset);
        break;
    case CALL_GET_ATTRIBUTE:
        result = fgetxattr(call->fd, call->name, call->value, call->value_bytes);
        break;
    case CALL_SET_ATTRIBUTE:
        result = fsetxattr(call->fd, call->name, call->value, call->value_bytes, 0);
        break;
    case CALL_TRUNCATE:
        result = ftruncate(call->fd, call->offset);
        break;
    case CALL_SYNC:
        result = fsync(call->fd);
        break;
    case CALL_STAT:
        result = get_stat(call);
        break;
    case CALL_PUBLISH:
    case CALL_UNLINK:
        result = change_name(call);
        break;
    }
    return result == -1 ? -errno : result;
}
