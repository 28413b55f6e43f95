/* The engine without Python: unit tests, and a fuzz driver of random batches and faults.

       test_engine unit | fuzz ROUNDS SEED | old-kernel

   Threads: the main thread is the engine's owner. A test that fails aborts. */

#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

static struct batch *run(struct engine *engine, struct batch *batch)
{
    struct batch *ended;
    CHECK(engine_submit(engine, batch) == 0);
    await_ended(engine, &ended, 1);
    CHECK(ended == batch);
    return batch;
}

static void check_statuses(const struct batch *batch, unsigned char expected)
{
    for (size_t i = 0; i < batch->count; i++)
        CHECK(batch->statuses[i] == expected);
}

static void await_threads(struct engine *engine, int expected)
{
    while (engine->counters[THREADS] != (uint64_t)expected)
        usleep(100);
}

/* -- unit tests --------------------------------------------------------------------------------- */

static void test_extents_are_read_as_they_were_written(size_t row_bytes, size_t slot_bytes)
{
    struct store store;
    struct engine *engine = open_engine(4096, 0, 8);
    open_store(&store, 20, row_bytes, slot_bytes, row_bytes);
    struct batch *stored = run(engine, extents_of(&store, true));
    struct batch *loaded = run(engine, extents_of(&store, false));
    check_statuses(stored, 0);
    check_statuses(loaded, 0);
    CHECK(memcmp(store.rows, store.loaded, store.count * row_bytes) == 0);
    CHECK(memcmp(stored->digests, loaded->digests, store.count * DIGEST_BYTES) == 0);
    for (size_t i = 0; i < store.count; i++)
        check_digest(&store, loaded, i);
    free_batch(stored);
    free_batch(loaded);

    /* the last slot needs no pad; a byte less, and its block is not whole */
    off_t end = (off_t)((store.count - 1) * slot_bytes + row_bytes);
    CHECK(ftruncate(store.fd, end) == 0);
    loaded = run(engine, extents_of(&store, false));
    check_statuses(loaded, 0);
    free_batch(loaded);
    CHECK(ftruncate(store.fd, end - 1) == 0);
    loaded = run(engine, extents_of(&store, false));
    for (size_t i = 0; i < store.count; i++)
        CHECK(loaded->statuses[i] == (i == store.count - 1 ? STATUS_ENDED_EARLY : 0));
    free_batch(loaded);
    close_engine(engine);
    close_store(&store);
}

static void test_short_and_interrupted_calls_go_on(bool is_encrypted)
{
    struct store store;
    struct engine *engine = is_encrypted ? open_encrypting_engine(1024) : open_engine(1024, 0, 8);
    open_store(&store, 40, 5000, 5120, 1);
    store.is_encrypted = is_encrypted;
    atomic_store(&faults.are_gentle, true);
    atomic_store(&faults.per_mille, 400);
    struct batch *batches[] = {extents_of(&store, true), extents_of(&store, false),
                               files_of(&store, BATCH_STORE_FILES),
                               files_of(&store, BATCH_LOAD_FILES)};
    for (size_t i = 0; i < 4; i++) {
        run(engine, batches[i]);
        check_statuses(batches[i], 0);
        CHECK(i % 2 == 0 || memcmp(store.rows, store.loaded, store.count * 5000) == 0);
        memset(store.loaded, 0, store.count * 5000);
        free_batch(batches[i]);
    }
    atomic_store(&faults.per_mille, 0);
    atomic_store(&faults.are_gentle, false);
    close_engine(engine);
    close_store(&store);
}

static void flip(int fd, size_t at)
{
    unsigned char byte;
    CHECK(pread(fd, &byte, 1, (off_t)at) == 1);
    byte ^= 1;
    CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1);
}

/* Checks that a row has its block or, after a failure, no byte of it. */
static void check_row(const struct store *store, const struct batch *batch, size_t index, bool is_whole)
{
    size_t at = (size_t)batch->rows[index] * store->row_bytes;
    const unsigned char *row = store->loaded + at;
    for (size_t i = 0; i < store->row_bytes; i++)
        CHECK(row[i] == (is_whole ? store->rows[at + i] : 0));
}

static void test_encrypted_extents(size_t row_bytes, size_t slot_bytes)
{
    struct store store;
    struct engine *engine = open_encrypting_engine(4096);
    open_store(&store, 20, row_bytes, slot_bytes, row_bytes);
    store.is_encrypted = true;
    struct batch *stored = run(engine, extents_of(&store, true));
    struct batch *loaded = run(engine, extents_of(&store, false));
    check_statuses(stored, 0);
    check_statuses(loaded, 0);
    CHECK(memcmp(store.rows, store.loaded, store.count * row_bytes) == 0);
    CHECK(memcmp(stored->digests, loaded->digests, store.count * SEAL_BYTES) == 0);
    free_batch(loaded);

    /* a byte of the block, its key's id, its salt, its nonce, its tag; the end of the last seal */
    flip(store.fd, 2 * slot_bytes + row_bytes - 1);
    flip(store.fd, 3 * slot_bytes + row_bytes);
    flip(store.fd, 4 * slot_bytes + row_bytes + KEY_ID_BYTES);
    flip(store.fd, 6 * slot_bytes + row_bytes + NONCE_AT);
    flip(store.fd, 10 * slot_bytes + row_bytes + SEAL_BYTES - 1);
    CHECK(ftruncate(store.fd, (off_t)(19 * slot_bytes + row_bytes + SEAL_BYTES - 1)) == 0);
    memset(store.loaded, 0xff, store.count * row_bytes);
    loaded = run(engine, extents_of(&store, false));
    for (size_t i = 0; i < store.count; i++) {
        bool is_bad = i == 2 || i == 3 || i == 4 || i == 6 || i == 10;
        CHECK(loaded->statuses[i] == (is_bad    ? STATUS_NOT_DECRYPTED
                                      : i == 19 ? STATUS_ENDED_EARLY
                                                : 0));
        if (i != 19 || row_bytes <= 4096) /* without its seal, a long row is not read */
            check_row(&store, loaded, i, loaded->statuses[i] == 0);
    }
    CHECK(digest_of(loaded, 3)[0] == 6); /* of no key */
    free_batch(stored);
    free_batch(loaded);
    close_engine(engine);
    close_store(&store);
}

static void test_encrypted_files(size_t row_bytes)
{
    struct store store;
    struct engine *engine = open_encrypting_engine(4096);
    open_store(&store, 9, row_bytes, row_bytes, row_bytes);
    store.is_encrypted = true;
    struct batch *stored = run(engine, files_of(&store, BATCH_STORE_FILES));
    check_statuses(stored, 0);
    struct batch *loaded = run(engine, files_of(&store, BATCH_LOAD_FILES));
    check_statuses(loaded, 0);
    CHECK(memcmp(store.rows, store.loaded, store.count * row_bytes) == 0);
    free_batch(loaded);

    char value[1 + SEAL_BYTES], path[128];
    for (int i = 0; i < 4; i++) { /* a byte of the block, its key's id, its tag, its length */
        snprintf(path, sizeof path, "%s/leaf/%d.bin", store.folder, i);
        int fd = open(path, O_RDWR);
        CHECK(fd != -1 && fgetxattr(fd, "user.kvoffload.test", value, sizeof value) == sizeof value);
        value[i == 1 ? 1 : SEAL_BYTES] ^= i == 1 || i == 2;
        if (i == 0)
            flip(fd, 0);
        CHECK(fsetxattr(fd, "user.kvoffload.test", value, sizeof value, 0) == 0);
        CHECK(ftruncate(fd, (off_t)row_bytes - (i == 3)) == 0 && close(fd) == 0);
    }
    loaded = files_of(&store, BATCH_LOAD_FILES);
    memcpy(value + 1, digest_of(stored, 5), SEAL_BYTES); /* of another block than is expected of it */
    value[0] = 1;
    loaded->expected[4] = value;
    run(engine, loaded);
    for (size_t i = 0; i < store.count; i++) {
        CHECK(loaded->statuses[i] == (i < 4));
        check_row(&store, loaded, i, i >= 4);
    }
    free_batch(loaded);
    free_batch(stored);
    close_engine(engine);
    close_store(&store);
}

/* Whatever fails, a row has its block, or the load failed. */
static void test_encrypted_blocks_amid_faults(uint64_t seed)
{
    struct store store;
    struct engine *engine = open_encrypting_engine(1024);
    open_store(&store, 30, seed % 2 == 0 ? 300 : 3000, 4096, seed);
    store.is_encrypted = true;
    atomic_store(&faults.random, seed);
    atomic_store(&faults.per_mille, 100);
    for (int kind = 0; kind < 2; kind++) {
        struct batch *stored = run(engine, kind == 0 ? extents_of(&store, true)
                                                     : files_of(&store, BATCH_STORE_FILES));
        struct batch *loaded = run(engine, kind == 0 ? extents_of(&store, false)
                                                     : files_of(&store, BATCH_LOAD_FILES));
        for (size_t i = 0; i < store.count; i++) {
            if (loaded->statuses[i] == 0)
                check_row(&store, loaded, i, true);
        }
        free_batch(stored);
        free_batch(loaded);
    }
    atomic_store(&faults.per_mille, 0);
    close_engine(engine);
    close_store(&store);
}

static void test_runs_fail_on_their_own(void)
{
    struct store store;
    struct engine *engine = open_engine(1 << 20, 0, 8);
    open_store(&store, 9, 1000, 1000, 1);
    struct batch *batch = extents_of(&store, true);
    batch->runs[1].fd = 9999;
    run(engine, batch);
    for (size_t i = 0; i < 9; i++)
        CHECK(batch->statuses[i] == (i / 3 == 1 ? EBADF : 0));
    free_batch(batch);
    close_engine(engine);
    close_store(&store);
}

static void test_files(size_t row_bytes)
{
    struct store store;
    struct engine *engine = open_engine(4096, 0, 8);
    open_store(&store, 20, row_bytes, row_bytes, row_bytes);
    struct batch *stored = run(engine, files_of(&store, BATCH_STORE_FILES));
    check_statuses(stored, 0);
    CHECK(stored->disk_bytes[0] >= (int64_t)row_bytes);
    struct batch *again = run(engine, files_of(&store, BATCH_STORE_FILES));
    check_statuses(again, 1);
    struct batch *loaded = run(engine, files_of(&store, BATCH_LOAD_FILES));
    check_statuses(loaded, 0);
    CHECK(memcmp(store.rows, store.loaded, store.count * row_bytes) == 0);
    CHECK(memcmp(stored->digests, loaded->digests, store.count * DIGEST_BYTES) == 0);
    struct batch *found = run(engine, files_of(&store, BATCH_HAS_FILES));
    check_statuses(found, 1);
    free_batch(stored);
    free_batch(again);
    free_batch(loaded);
    free_batch(found);

    if (mknodat(store.folder_fd, "leaf/device", S_IFCHR | 0600, makedev(1, 5)) == 0) { /* zeros */
        loaded = files_of(&store, BATCH_LOAD_FILES);
        loaded->has_digests = false; /* nothing is verified */
        free((void *)(uintptr_t)loaded->names[0]);
        loaded->names[0] = strdup("leaf/device");
        run(engine, loaded);
        CHECK(loaded->statuses[0] == 1 && loaded->statuses[1] == 0);
        free_batch(loaded);
    }

    /* too short, too long, another byte, another value, a folder, a link, a pipe, gone */
    CHECK(fchdir(store.folder_fd) == 0 && chdir("leaf") == 0);
    CHECK(truncate("0.bin", (off_t)row_bytes - 1) == 0);
    CHECK(truncate("1.bin", (off_t)row_bytes + 1) == 0);
    int fd = open("2.bin", O_RDWR);
    CHECK(pwrite(fd, store.rows, 1, 0) == 1 && pwrite(fd, "x", 1, 1) == 1 && close(fd) == 0);
    fd = open("3.bin", O_RDWR);
    CHECK(fsetxattr(fd, "user.kvoffload.test", "\1twelve and four", 17, 0) == 0 && close(fd) == 0);
    CHECK(unlink("4.bin") == 0 && mkdir("4.bin", 0700) == 0);
    CHECK(unlink("5.bin") == 0 && symlink("6.bin", "5.bin") == 0);
    CHECK(unlink("7.bin") == 0 && mkfifo("7.bin", 0600) == 0);
    CHECK(unlink("8.bin") == 0);
    loaded = run(engine, files_of(&store, BATCH_LOAD_FILES));
    static const unsigned char bad[20] = {1, 1, 1, 1, 1, 1, 0, 1, 1};
    CHECK(memcmp(loaded->statuses, bad, 20) == 0);
    free_batch(loaded);
    found = run(engine, files_of(&store, BATCH_HAS_FILES));
    for (size_t i = 0; i < 20; i++)
        CHECK(found->statuses[i] == (i != 4 && i != 5 && i != 7 && i != 8));
    free_batch(found);
    stored = run(engine, files_of(&store, BATCH_STORE_FILES)); /* nothing is replaced */
    for (size_t i = 0; i < 20; i++)
        CHECK(stored->statuses[i] == (i == 4 || i == 5 || i == 7 ? 2 : i != 8));
    CHECK(access("4.bin.tmp", F_OK) != 0 && access("5.bin.tmp", F_OK) != 0);
    free_batch(stored);

    /* a link in the place of the folder is not followed */
    CHECK(chdir("..") == 0 && rename("leaf", "real") == 0 && symlink("real", "leaf") == 0);
    loaded = run(engine, files_of(&store, BATCH_LOAD_FILES));
    check_statuses(loaded, 1);
    free_batch(loaded);
    stored = run(engine, files_of(&store, BATCH_STORE_FILES));
    check_statuses(stored, 2);
    free_batch(stored);
    CHECK(chdir("/") == 0);
    close_engine(engine);
    close_store(&store);
}

static void test_what_waits_can_be_withdrawn(void)
{
    struct store store;
    struct batch *ended[3];
    struct engine *engine = open_engine(1000, 0, 8);
    open_store(&store, 40, 1000, 1000, 1);
    hang_calls(CALL_WRITE);
    struct batch *first = extents_of(&store, true), *second = files_of(&store, BATCH_STORE_FILES);
    struct batch *other = extents_of(&store, true);
    CHECK(engine_submit(engine, first) == 0);
    await_hanging(2); /* in its first parts: no more threads write into one file */
    CHECK(engine_submit(engine, second) == 0);
    CHECK(engine_submit(engine, other) == 0);
    engine_withdraw(engine, 12345);
    engine_withdraw(engine, first->ticket);
    engine_withdraw(engine, second->ticket);
    release_calls();
    await_ended(engine, ended, 3);
    check_statuses(other, 0);
    int num_done = 0;
    for (size_t i = 0; i < first->count; i++) {
        CHECK(first->statuses[i] == 0 || first->statuses[i] == ECANCELED);
        num_done += first->statuses[i] == 0;
    }
    CHECK(num_done == 8); /* two parts of four */
    CHECK(second->statuses[39] == STATUS_NOT_BEGUN);
    free_batch(other);
    free_batch(first);
    free_batch(second);
    close_engine(engine);
    close_store(&store);
}

static void test_the_queue_is_bounded(void)
{
    struct store store;
    struct batch *ended[3], *batches[4];
    struct engine *engine = open_engine(1000, 0, 2);
    open_store(&store, 40, 1000, 1000, 1);
    hang_calls(CALL_WRITE);
    for (int i = 0; i < 4; i++)
        batches[i] = extents_of(&store, true);
    CHECK(engine_submit(engine, batches[0]) == 0);
    CHECK(engine_submit(engine, batches[1]) == 0);
    CHECK(engine_submit(engine, batches[2]) == EAGAIN);
    release_calls();
    await_ended(engine, ended, 2);
    CHECK(engine_close(engine, 60000000000) == 0);
    CHECK(engine_submit(engine, batches[3]) == ESHUTDOWN);
    engine_free(engine);
    for (int i = 0; i < 4; i++)
        free_batch(batches[i]);
    close_store(&store);
}

static void test_spares_stand_for_threads_that_hang(void)
{
    struct store store;
    struct engine *engine = open_engine(1 << 20, 2, 8);
    open_store(&store, 1, 1000, 1000, 1);
    struct batch *hung[3], *other = extents_of(&store, true);
    hang_calls(CALL_STAT);
    for (int i = 0; i < 3; i++) {
        hung[i] = files_of(&store, BATCH_HAS_FILES);
        CHECK(engine_submit(engine, hung[i]) == 0);
    }
    await_hanging(3);
    CHECK(engine_replace_hung(engine, 60000000000) == 0);
    CHECK(engine_replace_hung(engine, 0) == 3);
    CHECK(engine->counters[THREADS] == 5 && engine->counters[SPARES] == 2);
    run(engine, other); /* by a spare */
    CHECK(engine_replace_hung(engine, 0) == 3);
    release_calls();
    await_ended(engine, hung, 3);
    await_threads(engine, 3);
    CHECK(engine_replace_hung(engine, 0) == 0); /* joins those that were replaced */
    CHECK(engine->counters[SPARES] == 0);
    free_batch(other);
    for (int i = 0; i < 3; i++)
        free_batch(hung[i]);
    close_engine(engine);
    close_store(&store);
}


static void test_close_leaves_behind_what_hangs_until_it_has_ended(void)
{
    struct store store;
    struct batch *ended[2];
    struct engine *engine = open_engine(1000, 0, 8);
    open_store(&store, 40, 1000, 1000, 1);
    hang_calls(CALL_READ);
    struct batch *hung = extents_of(&store, false), *waiting = extents_of(&store, false);
    CHECK(engine_submit(engine, hung) == 0 && engine_submit(engine, waiting) == 0);
    await_hanging(3);
    CHECK(engine_close(engine, 1000000) == 3);
    await_ended(engine, ended, 1);
    CHECK(ended[0] == waiting);
    check_statuses(waiting, ECANCELED);
    release_calls();
    await_ended(engine, ended, 1);
    CHECK(ended[0] == hung && memchr(hung->statuses, ECANCELED, hung->count) != NULL);
    close_engine(engine);
    free_batch(hung);
    free_batch(waiting);
    close_store(&store);
}

static void test_copies(void)
{
    unsigned char target[100] = {0}, source[100], statuses[3] = {0};
    struct part parts[4];
    struct copy copies[] = {{0, 50, 30, 1, 0, 0}, {30, 0, 20, 1, 0, 0}, {60, 49, 1, 2, 3, 50}};
    memset(source, 7, 50);
    memset(source + 50, 9, 50);
    struct engine *engine = open_engine(10, 0, 8);
    struct batch batch = {.kind = BATCH_COPIES,
                          .count = 3,
                          .copies = copies,
                          .memory = {target, 1, 1},
                          .source = source,
                          .parts = parts,
                          .statuses = statuses};
    run(engine, &batch);
    CHECK(target[0] == 9 && target[29] == 9 && target[30] == 7 && target[49] == 7);
    CHECK(target[50] == 0 && target[60] == 7 && target[61] == 0 && target[63] == 9);
    CHECK(statuses[0] == 0);
    close_engine(engine);
}

static void test_signals_do_not_reach_the_threads(void)
{
    struct store store;
    struct engine *engine = open_engine(4096, 0, 8);
    open_store(&store, 1, 10, 10, 1);
    free_batch(run(engine, extents_of(&store, true)));
    char line[256];
    FILE *tasks = popen("grep -h SigBlk /proc/$PPID/task/*/status | sort -u", "r");
    int num_blocking = 0;
    while (fgets(line, sizeof line, tasks) != NULL)
        num_blocking += strstr(line, "fffffffe7ffb") != NULL; /* all but KILL, STOP, 32, 33 */
    CHECK(pclose(tasks) == 0 && num_blocking == 1);
    close_engine(engine);
    close_store(&store);
}

static void run_unit_tests(void)
{
    test_extents_are_read_as_they_were_written(100, 100);
    test_extents_are_read_as_they_were_written(100, 128);
    test_extents_are_read_as_they_were_written(4096, 4096);
    test_extents_are_read_as_they_were_written(10001, 10240);
    test_short_and_interrupted_calls_go_on(false);
    test_short_and_interrupted_calls_go_on(true);
    test_encrypted_extents(1000, 1052);
    test_encrypted_extents(4096, 8192);
    test_encrypted_extents(10000, 12288);
    test_encrypted_files(1000);
    test_encrypted_files(10000);
    for (uint64_t seed = 1; seed <= 20; seed++)
        test_encrypted_blocks_amid_faults(seed);
    test_runs_fail_on_their_own();
    test_files(100);
    test_files(4096);
    test_files(10001);
    test_what_waits_can_be_withdrawn();
    test_the_queue_is_bounded();
    test_spares_stand_for_threads_that_hang();
    test_close_leaves_behind_what_hangs_until_it_has_ended();
    test_copies();
    test_signals_do_not_reach_the_threads();
}

/* -- the fuzz driver ---------------------------------------------------------------------------- */

enum { STORES_AT_ONCE = 4 };

static void check_loaded(const struct store *store, const struct batch *stored,
                         const struct batch *loaded, size_t index)
{
    bool was_stored = stored->statuses[index] == 0, is_loaded = loaded->statuses[index] == 0;
    size_t at = (size_t)stored->rows[index] * store->row_bytes;
    if (!is_loaded)
        return;
    check_digest(store, loaded, index);
    /* a file that verifies is right, whatever was said of its store */
    if (was_stored || loaded->names != NULL)
        CHECK(memcmp(store->rows + at, store->loaded + at, store->row_bytes) == 0);
}

static void fuzz_round(_Atomic uint64_t *random, struct engine *engine)
{
    struct store stores[STORES_AT_ONCE];
    struct batch *stored[STORES_AT_ONCE], *loaded[STORES_AT_ONCE], *ended[STORES_AT_ONCE];
    for (int i = 0; i < STORES_AT_ONCE; i++) {
        size_t row_bytes = 1 + next_random(random) % 12000;
        open_store(&stores[i], 1 + next_random(random) % 24, row_bytes,
                   row_bytes + next_random(random) % 600, next_random(random));
        stored[i] = next_random(random) % 2 ? extents_of(&stores[i], true)
                                            : files_of(&stores[i], BATCH_STORE_FILES);
        loaded[i] = stored[i]->runs ? extents_of(&stores[i], false)
                                    : files_of(&stores[i], BATCH_LOAD_FILES);
        stored[i]->fsync = next_random(random) % 4 == 0;
    }
    for (int turn = 0; turn < 2; turn++) {
        struct batch **batches = turn == 0 ? stored : loaded;
        atomic_store(&faults.per_mille, (int)(next_random(random) % 3) * 60);
        if (next_random(random) % 3 == 0)
            hang_calls((enum call_kind)(next_random(random) % (CALL_UNLINK + 1)));
        for (int i = 0; i < STORES_AT_ONCE; i++)
            CHECK(engine_submit(engine, batches[i]) == 0);
        for (int i = 0; i < STORES_AT_ONCE; i++) {
            if (next_random(random) % 3 == 0)
                engine_withdraw(engine, batches[i]->ticket);
            engine_replace_hung(engine, 0);
        }
        release_calls();
        await_ended(engine, ended, STORES_AT_ONCE);
        atomic_store(&faults.per_mille, 0);
    }
    for (int i = 0; i < STORES_AT_ONCE; i++) {
        for (size_t j = 0; j < stores[i].count; j++)
            check_loaded(&stores[i], stored[i], loaded[i], j);
        free_batch(stored[i]);
        free_batch(loaded[i]);
        close_store(&stores[i]);
    }
}

/* Closes an engine while something waits, is moved, and hangs. */
static void fuzz_close(_Atomic uint64_t *random)
{
    struct store store;
    struct batch *batches[3], *ended[3];
    struct engine *engine = open_engine(1024, 1, 8);
    open_store(&store, 30, 1024, 1024, next_random(random));
    bool hangs = next_random(random) % 2;
    if (hangs)
        hang_calls(CALL_WRITE);
    for (int i = 0; i < 3; i++) {
        batches[i] = extents_of(&store, i < 2);
        CHECK(engine_submit(engine, batches[i]) == 0);
    }
    if (next_random(random) % 2)
        engine_replace_hung(engine, 0);
    int num_left = engine_close(engine, hangs ? 100000 : 60000000000);
    CHECK(hangs || num_left == 0);
    release_calls();
    await_ended(engine, ended, 3);
    for (int i = 0; i < 3; i++)
        free_batch(batches[i]);
    close_engine(engine);
    close_store(&store);
}

static void run_fuzz(int rounds, uint64_t seed)
{
    _Atomic uint64_t random = seed;
    struct engine *engine = open_engine(2048, 2, 8);
    atomic_store(&faults.random, seed);
    for (int i = 0; i < rounds; i++) {
        fuzz_round(&random, engine);
        fuzz_close(&random);
    }
    close_engine(engine);
}

/* -- a kernel without openat2 ------------------------------------------------------------------- */

static void forbid_openat2(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 437, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int count, char **arguments)
{
    if (count == 2 && strcmp(arguments[1], "unit") == 0) {
        run_unit_tests();
    } else if (count == 2 && strcmp(arguments[1], "old-kernel") == 0) {
        forbid_openat2();
        run_unit_tests();
    } else if (count == 4 && strcmp(arguments[1], "fuzz") == 0) {
        run_fuzz(atoi(arguments[2]), strtoull(arguments[3], NULL, 10));
    } else {
        fprintf(stderr, "usage: test_engine unit | fuzz ROUNDS SEED | old-kernel\n");
        return 2;
    }
    printf("%s: passed\n", arguments[1]);
    return 0;
}
