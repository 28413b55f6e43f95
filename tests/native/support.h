/* What the tests of the engine share: faults, hashes and ciphers that are none, batches. Threads: see each. */

#ifndef KVOFFLOAD_TESTS_SUPPORT_H
#define KVOFFLOAD_TESTS_SUPPORT_H

#include "block_io.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do { /* a macro: it names the line and the text */                                             \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

struct faults { /* of every call; set while no call is made, but for what is atomic */
    _Atomic uint64_t random;
    _Atomic int per_mille;    /* calls that fail, are cut short or are interrupted */
    _Atomic bool are_gentle;  /* no calls fail: whoever goes on has it all in the end */
    _Atomic int hanging_kind; /* calls of this kind hang; -1: none */
    _Atomic int num_hanging;
    pthread_mutex_t mutex;
    pthread_cond_t released;
};

extern struct faults faults;
extern const struct hashes plain_hashes;

int64_t make_faulty_call(const struct file_call *call);
uint64_t next_random(_Atomic uint64_t *state);
void hang_calls(enum call_kind kind);
void release_calls(void);
void await_hanging(int num);

/* A file for blocks, the rows to store and those to load into, and where the blocks lie. */
struct store {
    char folder[64];
    int folder_fd;
    int fd;
    size_t count, row_bytes, slot_bytes;
    bool is_encrypted;
    unsigned char *rows, *loaded;
};

void open_store(struct store *store, size_t count, size_t row_bytes, size_t slot_bytes,
                uint64_t random);
void close_store(struct store *store);
struct batch *extents_of(struct store *store, bool is_store);
struct batch *files_of(struct store *store, enum batch_kind kind);
void free_batch(struct batch *batch);
void check_digest(const struct store *store, const struct batch *batch, size_t index);

/* Waits until a number of batches has ended; they are in `ended`, in any order. */
void await_ended(struct engine *engine, struct batch *ended[], int num);
struct engine *open_engine(size_t piece_bytes, int spare_threads, int queued);
struct engine *open_encrypting_engine(size_t piece_bytes);
void close_engine(struct engine *engine);

#endif
