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

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum {
    DIGEST_BYTES = 16,
    MAX_PAD_BYTES = 65536, /* between the end of a row and the end of its slot in a file */
    MAX_VALUE_BYTES = 64,  /* of the attribute that holds a digest */
    MAX_NAME_BYTES = 4096,
};

/* XXH3 by the addresses of its functions; hash128 is laid out and returned as XXH128_hash_t. */
struct hash128 {
    uint64_t low;
    uint64_t high;
};

struct hashes { /* engine.py has the same order */
    uint64_t (*hash64)(const void *data, size_t bytes);
    void *(*create_state)(void);
    int (*reset)(void *state, uint64_t seed);
    int (*update)(void *state, const void *data, size_t bytes);
    struct hash128 (*digest)(const void *state);
    int (*free_state)(void *state);
};

/* -- system calls ------------------------------------------------------------------------------- */

enum call_kind { /* file_calls.py has the same order */
    CALL_OPEN,          /* a regular file beneath the root, no link followed -> descriptor */
    CALL_CLOSE,
    CALL_READ,          /* -> bytes */
    CALL_WRITE,         /* -> bytes */
    CALL_GET_ATTRIBUTE, /* into the buffer -> bytes; -ENODATA if there is none */
    CALL_SET_ATTRIBUTE,
    CALL_TRUNCATE,      /* to `offset` bytes */
    CALL_SYNC,          /* bytes and attributes */
    CALL_STAT,          /* of `name`; the buffer is a file_status */
    CALL_PUBLISH,       /* rename `name` to `target` in the same folder, not replacing it */
    CALL_UNLINK,
};

struct file_status { /* file_calls.py knows how it is laid out */
    int64_t is_regular;
    int64_t disk_bytes;
};

struct root { /* a directory */
    int fd;
    const char *path;
};

struct folder { /* the last folder that a thread used; closed at the end of a part */
    int fd;     /* -1: none */
    const char *name;
    size_t name_bytes;
};

struct file_call { /* file_calls.py knows how it is laid out, up to the folder */
    enum call_kind kind;
    int fd;
    int flags;                /* CALL_OPEN, in addition to those that protect */
    int mode;                 /* of a new file; -1: as its folder's */
    const struct root *root;
    const char *name;         /* relative to the root; an attribute's */
    const char *target;
    const struct iovec *buffers;
    int64_t num_buffers;
    int64_t offset;
    struct folder *folder;
};

/* Every system call on files goes through one of these; returns -errno if it fails. */
typedef int64_t file_caller(const struct file_call *call);

int64_t make_system_call(const struct file_call *call);
void close_folder(struct folder *folder);

/* -- batches ------------------------------------------------------------------------------------ */

enum batch_kind { /* engine.py has the same order */
    BATCH_EXTENTS,
    BATCH_LOAD_FILES,
    BATCH_STORE_FILES,
    BATCH_HAS_FILES,
    BATCH_COPIES,
};

/* Of a block: 0 if it was moved, and else */
enum status { /* engine.py knows them */
    STATUS_ENDED_EARLY = 255, /* EXTENTS: the file has no more bytes; else an errno */
    STATUS_NOT_BEGUN = 3,     /* LOAD_FILES, STORE_FILES; EXTENTS, COPIES: ECANCELED */
    STATUS_OTHERWISE = 1,     /* LOAD_FILES: anything but a block that is whole and verified */
    STATUS_PRESENT = 1,       /* STORE_FILES: the name is there already */
    STATUS_NOT_STORED = 2,    /* STORE_FILES: anything else; the temporary file is removed */
    STATUS_THERE = 1,         /* HAS_FILES: a regular file */
};

struct memory { /* rows behind each other; in a file, each fills a slot */
    unsigned char *base;
    size_t row_bytes;
    size_t slot_bytes;
};

struct run { /* of blocks that lie behind each other in a file, and fail together */
    int64_t fd;
    int64_t offset;
    int64_t length;
};

struct copy {
    int64_t target;
    int64_t source;
    int64_t bytes;
};

struct part { /* blocks of a batch that one thread moves */
    struct batch *batch;
    struct part *next; /* in the queue */
    size_t first;
    size_t count;
    size_t run;  /* of the first block */
    size_t skip; /* blocks of that run before it */
    int64_t file; /* the descriptor it writes to; -1: nobody else can */
};

struct batch {
    uint64_t ticket;
    enum batch_kind kind;
    bool is_store;
    size_t count; /* of blocks, names or copies */

    struct memory memory; /* for copies: the target */
    const unsigned char *source;
    int64_t *rows;
    uint64_t *seeds; /* of the blocks' digests; NULL: none are wanted */
    struct run *runs;
    const struct copy *copies;

    struct root root;
    const char **names;
    const char **temps; /* each in the folder of its name */
    const char *attribute;
    const void *value_prefix; /* what precedes the digest in the attribute */
    size_t value_prefix_bytes;
    const char **expected; /* values of the attribute, where they are known */
    const char *recycled; /* for each temporary file: whether it is there already */
    int file_mode; /* -1: as the folder's */
    bool fsync;
    bool wants_disk_bytes;

    /* the outcome, an item for each block */
    unsigned char *statuses;
    unsigned char *digests;
    int64_t *disk_bytes;

    /* the engine's, under its mutex */
    struct batch *next;
    struct part *parts; /* as many as blocks at most */
    size_t num_parts;
    size_t num_unfinished;
    size_t num_waiting;
};

/* -- engines ------------------------------------------------------------------------------------ */

enum { LOADS, STORES, NUM_DIRECTIONS };

enum counter { /* engine.py has the same order */
    SYSTEM_CALLS,
    PIECES,
    BYTES,
    HASHED_BYTES,
    BATCHES,
    PARTS,
    WAKE_UPS,
    THREADS,
    SPARES, /* threads that stand for one that hangs */
    NUM_COUNTERS,
};

struct limits {
    int threads[NUM_DIRECTIONS]; /* that prefer this direction */
    int spare_threads;
    int queued; /* batches of each direction of which something waits */
    size_t piece_bytes; /* moved by one system call, and hashed while in the cache */
    size_t part_bytes;  /* moved by one thread before it looks what is next */
};

struct worker { /* a thread, and what it alone uses while it does a part */
    struct engine *engine;
    void *hash_state;
    struct folder folder;
    _Atomic int64_t in_call_since_ns; /* 0: in none */
    unsigned char scratch[MAX_PAD_BYTES]; /* for pads that are read */

    /* under the engine's mutex */
    struct worker *next;
    pthread_t thread;
    int direction; /* which it prefers */
    int64_t file;  /* the descriptor it writes to; -1: none */
    bool is_replaced;
    bool has_ended;
};

struct queue {
    struct part *first;
    struct part **last; /* where the next part is linked */
    int num_batches;    /* of which something waits */
};

struct engine {
    struct limits limits;
    struct hashes hashes;
    file_caller *call;
    int event_fd;
    char name[16]; /* what the kernel keeps of a thread's name */
    _Atomic uint64_t counters[NUM_COUNTERS];

    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t work_waits;
    pthread_cond_t thread_ended;
    struct queue queues[NUM_DIRECTIONS];
    struct worker *workers;
    struct batch *ended; /* the latest first; the owner is told of the first */
    bool is_closing;
    uint64_t last_ticket;
};

/* blocks.c: cuts a batch; does a part; notes that a part will not be done. */
void cut_batch(struct batch *batch, size_t part_bytes);
void do_part(struct worker *worker, const struct part *part);
void cancel_part(const struct part *part);

/* pool.c. `open` returns NULL with errno set. `close` returns how many threads are left behind,
   after which an engine, and whatever they hold, must be kept until a later call returns 0. */
struct engine *engine_open(const char *name, const struct limits *limits, file_caller *call,
                           const struct hashes *hashes);
int engine_submit(struct engine *engine, struct batch *batch); /* EAGAIN, ESHUTDOWN */
struct batch *engine_take(struct engine *engine);               /* a list of what has ended */
void engine_withdraw(struct engine *engine, uint64_t ticket);   /* 0: all */
int engine_replace_hung(struct engine *engine, int64_t hung_after_ns);
int engine_close(struct engine *engine, int64_t timeout_ns);
void engine_free(struct engine *engine);
int64_t monotonic_ns(void);
void count_up(struct engine *engine, enum counter counter, uint64_t more);

#endif
