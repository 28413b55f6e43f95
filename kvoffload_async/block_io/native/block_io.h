/* Moves and hashes blocks between memory and files, by threads of its own.

   pool.c     the threads, the queues, the end of a batch
   blocks.c   what a thread does with a part of a batch, and the system calls
   module.c   the Python binding; the only file that knows Python.h

   Threads: whoever opens an engine is its owner; he submits batches and takes them back, one call
   at a time (module.c: the interpreter's lock). The engine's threads touch a batch between the two.

   Ownership: a batch belongs to the engine from a submission that succeeds until it is taken. What
   it points to stays where it is for as long: memory, rows, names, and the space for its outcome.
   Two threads never work on one block, so that nothing in a batch needs a lock but the fields that
   say otherwise. */

#ifndef KVOFFLOAD_BLOCK_IO_H
#define KVOFFLOAD_BLOCK_IO_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum {
    PIECE_BYTES = 256 << 10, /* see `struct limits`; measured */
    PART_BYTES = 1 << 20,
    DIGEST_BYTES = 16,
    MAX_PAD_BYTES = 65536,   /* between the end of a row and the end of its slot in a file */
    MAX_VALUE_BYTES = 64,    /* of the attribute that holds a digest */
    ENDED_EARLY = -1,        /* in the place of an errno: the file has no more bytes */
    OUTCOME_CANCELLED = 3,   /* a block of `statuses` that nobody has begun */
};

/* -- hashing: XXH3 by the addresses of its functions -------------------------------------------- */

struct hash128 { /* laid out and returned as XXH128_hash_t */
    uint64_t low;
    uint64_t high;
};

struct hashes {
    uint64_t (*hash64)(const void *data, size_t bytes);
    struct hash128 (*hash128)(const void *data, size_t bytes, uint64_t seed);
    void *(*create_state)(void);
    int (*reset)(void *state, uint64_t seed);
    int (*update)(void *state, const void *data, size_t bytes);
    struct hash128 (*digest)(const void *state);
    int (*free_state)(void *state);
};

/* Tells whether these compute XXH3, whole and piece by piece. */
bool hashes_are_right(const struct hashes *hashes);

/* -- system calls ------------------------------------------------------------------------------- */

enum call_kind { /* file_calls.py has the same order */
    CALL_OPEN,          /* a regular file beneath the root, no link followed -> descriptor */
    CALL_CLOSE,
    CALL_READ,          /* -> bytes */
    CALL_WRITE,         /* -> bytes */
    CALL_GET_ATTRIBUTE, /* into `value` -> bytes; -ENODATA if there is none */
    CALL_SET_ATTRIBUTE,
    CALL_TRUNCATE,      /* to `offset` bytes */
    CALL_SYNC,          /* bytes and attributes */
    CALL_STAT,          /* of `fd`, or of `name` if that is -1; `value` is a struct file_status */
    CALL_PUBLISH,       /* rename `name` to `target` in the same folder, not replacing it */
    CALL_UNLINK,
};

struct root { /* a directory */
    int fd;
    const char *path;
};

struct folder { /* the last folder that a thread used; closed at the end of a part */
    int fd;     /* -1: none */
    const struct root *root;
    const char *name;
    size_t name_bytes;
};

struct file_status { /* file_calls.py knows how it is laid out */
    int64_t is_regular;
    int64_t size_bytes;
    int64_t disk_bytes;
};

struct file_call {
    enum call_kind kind;
    int fd;
    int flags;                /* CALL_OPEN, in addition to those that protect */
    int mode;                 /* of a new file; -1: as its folder's */
    const struct root *root;
    const char *name;         /* relative to the root; an attribute's */
    const char *target;
    const struct iovec *buffers;
    int num_buffers;
    int64_t offset;
    void *value;
    size_t value_bytes;
    struct folder *folder;
};

/* Every system call on files goes through one of these; returns -errno if it fails. */
struct file_calls {
    int64_t (*make)(void *self, const struct file_call *call);
    void *self;
};

int64_t make_system_call(void *self, const struct file_call *call);
void close_folder(struct folder *folder);

/* -- batches ------------------------------------------------------------------------------------ */

struct memory { /* rows behind each other; in a file, each fills a slot */
    unsigned char *base;
    size_t num_rows;
    size_t row_bytes;
    size_t slot_bytes;
};

struct place { /* of a block in a file */
    int64_t offset;
    int fd;
    int run; /* blocks of one run lie behind each other, and fail together */
};

struct copy {
    int64_t target;
    int64_t source;
    int64_t bytes;
};

struct known_value { /* of a block's attribute; `data` is NULL if it is not known */
    const void *data;
    size_t bytes;
};

enum batch_kind { BATCH_EXTENTS, BATCH_LOAD_FILES, BATCH_STORE_FILES, BATCH_HAS_FILES, BATCH_COPIES };

struct part { /* blocks of a batch that one thread moves */
    struct batch *batch;
    struct part *next; /* in the queue */
    size_t first;
    size_t count;
    int file; /* the descriptor it writes to; -1: nobody else can */
};

struct batch {
    uint64_t ticket;
    enum batch_kind kind;
    bool is_store;
    size_t count; /* of blocks, names or copies */

    struct memory memory; /* for copies: the target */
    struct memory source;
    const int64_t *rows;
    const uint64_t *seeds; /* of the blocks' digests; NULL: none are wanted */
    const struct place *places;
    const struct copy *copies;

    struct root root;
    const char *const *names;
    const char *const *temps;
    const char *attribute;
    const void *value_prefix; /* what precedes the digest in the attribute */
    size_t value_prefix_bytes;
    const struct known_value *expected;
    const char *recycled; /* for each temporary file: whether it is there already */
    int open_flags;
    int file_mode; /* -1: as the folder's */
    bool fsync;
    bool wants_disk_bytes;

    /* the outcome */
    int *errors;
    unsigned char *statuses;
    unsigned char *digests;
    int64_t *disk_bytes;
    bool is_cancelled; /* something of it was; written under the engine's mutex */

    /* the engine's, under its mutex */
    struct batch *next;
    struct part *parts;
    size_t num_parts;
    size_t num_unfinished;
    size_t num_waiting;
};

/* -- engines ------------------------------------------------------------------------------------ */

enum { LOADS, STORES, NUM_DIRECTIONS };

struct limits {
    int threads[NUM_DIRECTIONS]; /* that prefer this direction */
    int spare_threads;
    int queued; /* batches of each direction of which something waits */
    size_t piece_bytes; /* moved by one system call, and hashed while in the cache */
    size_t part_bytes;  /* moved by one thread before it looks what is next */
};

struct counters {
    _Atomic uint64_t system_calls, pieces, bytes, hashed_bytes;
    _Atomic uint64_t batches, parts, wake_ups;
};

struct engine;

struct worker {
    struct engine *engine;
    const struct file_calls *files;
    const struct hashes *hashes;
    const struct limits *limits;
    struct counters *counters;
    void *hash_state;
    struct folder folder;
    _Atomic int64_t in_call_since_ns; /* 0: in none */
    unsigned char scratch[MAX_PAD_BYTES]; /* for pads that are read */
};

/* blocks.c: cuts a batch (false: no memory); does a part; notes that a part will not be done. */
bool cut_batch(struct batch *batch, const struct limits *limits);
void do_part(struct worker *worker, const struct part *part);
void cancel_part(struct part *part);

/* pool.c. `open` returns NULL with errno set. `close` returns how many threads are left behind,
   after which an engine, and whatever they hold, must be kept for ever; `free` needs it to be 0. */
struct engine *engine_open(const char *name, const struct limits *limits,
                           const struct file_calls *files, const struct hashes *hashes);
int engine_event_fd(const struct engine *engine);
int engine_submit(struct engine *engine, struct batch *batch); /* EAGAIN, ESHUTDOWN, ENOMEM */
struct batch *engine_take(struct engine *engine);               /* a list of what has ended */
void engine_withdraw(struct engine *engine, uint64_t ticket);
int engine_tend(struct engine *engine, int64_t hung_after_ns);
int engine_close(struct engine *engine, int64_t timeout_ns);
void engine_free(struct engine *engine);
size_t engine_part_bytes(const struct engine *engine);
uint64_t engine_hash64(const struct engine *engine, const void *data, size_t bytes);
const struct counters *engine_counters(const struct engine *engine);
void engine_threads(struct engine *engine, int *alive, int *spares);
int64_t monotonic_ns(void);

#endif
