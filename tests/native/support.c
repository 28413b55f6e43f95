/* See support.h. Threads: faults are drawn by the engine's threads, everything else is the test's. */

#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct faults faults = {.hanging_kind = -1,
                        .mutex = PTHREAD_MUTEX_INITIALIZER,
                        .released = PTHREAD_COND_INITIALIZER};

uint64_t next_random(_Atomic uint64_t *state)
{
    uint64_t number = atomic_fetch_add(state, 0x9e3779b97f4a7c15u); /* splitmix64 */
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9u;
    number = (number ^ (number >> 27)) * 0x94d049bb133111ebu;
    return number ^ (number >> 31);
}

/* -- faults ------------------------------------------------------------------------------------- */

void hang_calls(enum call_kind kind)
{
    atomic_store(&faults.hanging_kind, (int)kind);
}

void release_calls(void)
{
    pthread_mutex_lock(&faults.mutex);
    atomic_store(&faults.hanging_kind, -1);
    pthread_cond_broadcast(&faults.released);
    pthread_mutex_unlock(&faults.mutex);
}

void await_hanging(int num)
{
    while (atomic_load(&faults.num_hanging) < num)
        usleep(100);
}

static void hang_if_wanted(enum call_kind kind)
{
    if (atomic_load(&faults.hanging_kind) != (int)kind)
        return;
    pthread_mutex_lock(&faults.mutex);
    atomic_fetch_add(&faults.num_hanging, 1);
    while (atomic_load(&faults.hanging_kind) == (int)kind)
        pthread_cond_wait(&faults.released, &faults.mutex);
    atomic_fetch_sub(&faults.num_hanging, 1);
    pthread_mutex_unlock(&faults.mutex);
}

static int64_t make_shortened(const struct file_call *call)
{
    struct file_call shorter = *call;
    struct iovec buffer = call->buffers[0];
    buffer.iov_len = 1 + next_random(&faults.random) % buffer.iov_len;
    shorter.buffers = &buffer;
    shorter.num_buffers = 1;
    return make_system_call(&shorter);
}

int64_t make_faulty_call(const struct file_call *call)
{
    static const int codes[] = {EIO, ENOSPC, EINTR, ENOENT, EEXIST, EINVAL, EDQUOT, EACCES};
    hang_if_wanted(call->kind);
    uint64_t random = next_random(&faults.random);
    if ((int)(random % 1000) >= atomic_load(&faults.per_mille))
        return make_system_call(call);
    bool moves = call->kind == CALL_READ || call->kind == CALL_WRITE;
    if (moves && (random >> 20) % 2)
        return make_shortened(call);
    if (call->kind == CALL_CLOSE) /* which is closed nevertheless */
        make_system_call(call);
    if (atomic_load(&faults.are_gentle))
        return -EINTR;
    return -codes[(random >> 32) % (sizeof codes / sizeof *codes)];
}

/* -- hashes: FNV-1a twice, byte by byte, so that pieces make the whole --------------------------- */

struct state {
    struct hash128 hash;
};

static int reset(void *state, uint64_t seed)
{
    ((struct state *)state)->hash = (struct hash128){0xcbf29ce484222325u ^ seed, seed};
    return 0;
}

static int update(void *state, const void *data, size_t bytes)
{
    struct hash128 *hash = &((struct state *)state)->hash;
    for (size_t i = 0; i < bytes; i++) {
        hash->low = (hash->low ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
        hash->high += hash->low;
    }
    return 0;
}

static struct hash128 digest(const void *state)
{
    return ((const struct state *)state)->hash;
}

static struct hash128 hash128(const void *data, size_t bytes, uint64_t seed)
{
    struct state state;
    reset(&state, seed);
    update(&state, data, bytes);
    return state.hash;
}

static void *create_state(void)
{
    return malloc(sizeof(struct state));
}

static int free_state(void *state)
{
    free(state);
    return 0;
}

const struct hashes plain_hashes = {NULL, create_state, reset, update, digest, free_state};

/* -- a cipher that hides nothing: a stream of the nonce, and FNV-1a as its tag --------------------- */

struct cipher {
    uint64_t key, nonce, hash, at;
    int is_encryption;
    unsigned char tag[TAG_BYTES];
};

static uint64_t fnv(uint64_t hash, const unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * 0x100000001b3u;
    return hash;
}

static void *new_context(void)
{
    return calloc(1, sizeof(struct cipher));
}

static int init(void *context, const void *kind, void *engine, const unsigned char *key,
                const unsigned char *nonce, int is_encryption)
{
    struct cipher *cipher = context;
    (void)kind, (void)engine;
    if (key != NULL)
        cipher->key = fnv(1, key, 32);
    if (nonce != NULL)
        cipher->nonce = cipher->hash = fnv(cipher->key, nonce, TAG_AT - NONCE_AT);
    cipher->at = 0;
    cipher->is_encryption = is_encryption;
    return 1;
}

static int code(void *context, unsigned char *to, int *done, const unsigned char *from, int bytes)
{
    struct cipher *cipher = context;
    for (int i = 0; i < bytes; i++) {
        unsigned char before = from[i];
        if (to != NULL)
            to[i] = before ^ (unsigned char)((cipher->nonce + cipher->at++ * 0x9e3779b97f4a7c15u) >> 32);
        cipher->hash = fnv(cipher->hash, to != NULL && cipher->is_encryption ? to + i : &before, 1);
    }
    *done = bytes;
    return 1;
}

static int final(void *context, unsigned char *to, int *done)
{
    struct cipher *cipher = context;
    uint64_t tag[2] = {cipher->hash, ~cipher->hash};
    (void)to;
    *done = 0;
    if (!cipher->is_encryption)
        return memcmp(cipher->tag, tag, TAG_BYTES) == 0;
    memcpy(cipher->tag, tag, TAG_BYTES);
    return 1;
}

static int control(void *context, int kind, int bytes, void *tag)
{
    struct cipher *cipher = context;
    CHECK(bytes == TAG_BYTES && (kind == 0x10 || kind == 0x11));
    memcpy(kind == 0x10 ? tag : cipher->tag, kind == 0x10 ? cipher->tag : tag, TAG_BYTES);
    return 1;
}

static const void *no_algorithm(void)
{
    return NULL;
}

static unsigned char *hmac(const void *hash, const void *key, int key_bytes,
                           const unsigned char *data, size_t bytes, unsigned char *mac,
                           unsigned int *mac_bytes)
{
    (void)hash, (void)mac_bytes;
    uint64_t value = fnv(fnv(2, key, (size_t)key_bytes), data, bytes);
    for (int i = 0; i < 32; i++)
        mac[i] = (unsigned char)(value >> i % 8 * 8);
    return mac;
}

static const struct secret secrets[] = {{{9}, 3, "one"}, {{7}, 64, "the key that is used"}};
static const struct sealing plain_sealing = {
    {new_context, free, init, code, final, control, no_algorithm, no_algorithm, hmac},
    secrets, 2, (const unsigned char *)"info\1", 5};

/* -- stores and batches ------------------------------------------------------------------------- */

void open_store(struct store *store, size_t count, size_t row_bytes, size_t slot_bytes,
                uint64_t random)
{
    _Atomic uint64_t state = random;
    *store = (struct store){.count = count, .row_bytes = row_bytes, .slot_bytes = slot_bytes};
    strcpy(store->folder, "/tmp/kvoffload-native-XXXXXX");
    CHECK(mkdtemp(store->folder) != NULL);
    store->folder_fd = open(store->folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    CHECK(store->folder_fd != -1 && mkdirat(store->folder_fd, "leaf", 0700) == 0);
    store->fd = openat(store->folder_fd, "extents", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(store->fd != -1);
    store->rows = malloc(count * row_bytes);
    store->loaded = calloc(count, row_bytes);
    CHECK(store->rows != NULL && store->loaded != NULL);
    for (size_t i = 0; i < count * row_bytes; i++)
        store->rows[i] = (unsigned char)next_random(&state);
}

void close_store(struct store *store)
{
    char command[128];
    close(store->fd);
    close(store->folder_fd);
    free(store->rows);
    free(store->loaded);
    snprintf(command, sizeof command, "rm -rf %s", store->folder);
    CHECK(system(command) == 0);
}

static struct batch *new_batch(struct store *store, enum batch_kind kind, bool is_store)
{
    struct batch *batch = calloc(1, sizeof *batch);
    int64_t *rows = calloc(store->count, sizeof *rows);
    uint64_t *seeds = calloc(store->count, sizeof *seeds);
    CHECK(batch != NULL && rows != NULL && seeds != NULL);
    for (size_t i = 0; i < store->count; i++) {
        rows[i] = (int64_t)(store->count - 1 - i); /* in another order than the slots */
        seeds[i] = i * 7919;
    }
    batch->kind = kind;
    batch->is_store = is_store;
    batch->count = store->count;
    batch->memory = (struct memory){is_store ? store->rows : store->loaded, store->row_bytes,
                                    store->slot_bytes};
    batch->rows = rows;
    batch->seeds = seeds;
    batch->has_digests = true;
    batch->digest_bytes = store->is_encrypted ? SEAL_BYTES : DIGEST_BYTES;
    batch->digests = calloc(store->count, batch->digest_bytes);
    if (store->is_encrypted) {
        batch->bound = calloc(store->count, sizeof *batch->bound);
        CHECK(batch->bound != NULL);
    }
    for (size_t i = 0; i < store->count && store->is_encrypted; i++) {
        batch->bound[i] = (struct bound){(const unsigned char *)"key", i % 4};
        unsigned char *seal = digest_of(batch, i);
        if (is_store) { /* of the second key, with one of two salts */
            seal[0] = 7;
            seal[KEY_ID_BYTES] = i % 5 == 0;
            memcpy(seal + NONCE_AT, &i, sizeof i);
        }
    }
    batch->bound_prefix = (const unsigned char *)"prefix";
    batch->bound_prefix_bytes = 6;
    batch->statuses = calloc(store->count, 1);
    batch->parts = calloc(store->count + 1, sizeof *batch->parts);
    return batch;
}

struct batch *extents_of(struct store *store, bool is_store)
{
    struct batch *batch = new_batch(store, BATCH_EXTENTS, is_store);
    batch->runs = calloc(store->count, sizeof *batch->runs);
    for (size_t i = 0; i < store->count; i += 3) {
        size_t left = store->count - i;
        batch->runs[i / 3] = (struct run){store->fd, (int64_t)(i * store->slot_bytes),
                                          left < 3 ? (int64_t)left : 3};
    }
    return batch;
}

struct batch *files_of(struct store *store, enum batch_kind kind)
{
    struct batch *batch = new_batch(store, kind, kind == BATCH_STORE_FILES);
    char **names = calloc(store->count, sizeof *names);
    for (size_t i = 0; i < store->count; i++) {
        CHECK(asprintf(&names[i], "leaf/%zu.bin", i) > 0);
    }
    batch->names = (const char **)names;
    batch->victims = calloc(store->count, sizeof *batch->victims);
    batch->marker = "marker";
    batch->temp_stem = ".";
    batch->root = (struct root){store->folder_fd, store->folder};
    batch->attribute = "user.kvoffload.test";
    batch->value_prefix = "\1";
    batch->value_prefix_bytes = 1;
    batch->expected = calloc(store->count, sizeof *batch->expected);
    char *may_write = malloc(store->count);
    CHECK(may_write != NULL);
    memset(may_write, 1, store->count);
    batch->may_write = may_write;
    batch->file_mode = 0600;
    batch->wants_disk_bytes = true;
    batch->disk_bytes = calloc(2 * store->count, sizeof *batch->disk_bytes);
    batch->freed_bytes = batch->disk_bytes + store->count;
    return batch;
}

void free_batch(struct batch *batch)
{
    if (batch->names != NULL) {
        for (size_t i = 0; i < batch->count; i++)
            free((void *)(uintptr_t)batch->names[i]);
    }
    free(batch->names);
    free(batch->rows);
    free(batch->seeds);
    free(batch->bound);
    free(batch->runs);
    free(batch->expected);
    free((void *)(uintptr_t)batch->may_write);
    free(batch->victims);
    free(batch->statuses);
    free(batch->digests);
    free(batch->disk_bytes);
    free(batch->parts);
    free(batch);
}

void check_digest(const struct store *store, const struct batch *batch, size_t index)
{
    const unsigned char *row =
        batch->memory.base + (size_t)batch->rows[index] * store->row_bytes;
    struct hash128 hash = hash128(row, store->row_bytes, batch->seeds[index]);
    for (int i = 0; i < 8; i++) {
        const unsigned char *digest = batch->digests + index * DIGEST_BYTES;
        CHECK(digest[i] == (unsigned char)(hash.high >> (56 - 8 * i)));
        CHECK(digest[8 + i] == (unsigned char)(hash.low >> (56 - 8 * i)));
    }
}

/* -- engines ------------------------------------------------------------------------------------ */

void await_ended(struct engine *engine, struct batch *ended[], int num)
{
    for (int found = 0; found < num;) {
        struct pollfd event = {.fd = engine->event_fd, .events = POLLIN};
        CHECK(poll(&event, 1, 60000) == 1); /* a hang is a failure */
        for (struct batch *batch = engine_take(engine); batch != NULL; batch = batch->next) {
            CHECK(found < num);
            ended[found++] = batch;
        }
    }
}

static struct engine *open_with(size_t piece_bytes, int spare_threads, int queued,
                                const struct sealing *sealing)
{
    struct limits limits = {{2, 1}, spare_threads, queued, piece_bytes, 4 * piece_bytes};
    struct engine *engine = engine_open("test", &limits, make_faulty_call, &plain_hashes, sealing);
    CHECK(engine != NULL);
    return engine;
}

struct engine *open_engine(size_t piece_bytes, int spare_threads, int queued)
{
    static const struct sealing nothing;
    return open_with(piece_bytes, spare_threads, queued, &nothing);
}

struct engine *open_encrypting_engine(size_t piece_bytes)
{
    return open_with(piece_bytes, 0, 8, &plain_sealing);
}

void close_engine(struct engine *engine)
{
    CHECK(engine_close(engine, 60000000000) == 0);
    engine_free(engine);
}
