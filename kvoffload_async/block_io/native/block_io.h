/* Copies and hashes blocks between memory and files, on its own threads.

   pool.c     threads, queues, completion of batches
   blocks.c   processing of one part of a batch, and the system calls
   sealing.c  encryption of blocks
   module.c   the Python binding; only this file includes Python.h

   Threads: the owner, who opens the engine, submits and takes batches, one call at a time
   (module.c: with the GIL). The engine's threads access a batch between submit and take.

   Ownership: a batch belongs to the engine from a successful submission until it is taken. What it
   points to must stay valid meanwhile: memory, rows, names, and the arrays of its outcome. No two
   threads work on one block, so only the fields marked below need the mutex. */

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
    KEY_ID_BYTES = 8, /* of a seal, which takes the place of an encrypted block's digest */
    SALT_BYTES = 16,
    NONCE_AT = KEY_ID_BYTES + SALT_BYTES,
    TAG_BYTES = 16,
    TAG_AT = NONCE_AT + 12,
    SEAL_BYTES = TAG_AT + TAG_BYTES,
    MAX_SECRET_BYTES = 64,
    MAX_PAD_BYTES = 65536, /* between a row's end and its slot's end in a file */
    MAX_VALUE_BYTES = 64,  /* of the digest's attribute */
    MAX_NAME_BYTES = 4096,
    KEPT_FOLDERS = 4, /* a store in place of a victim uses three */
};

/* Addresses of XXH3 functions; hash128 has the layout of XXH128_hash_t. */
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

/* Addresses of OpenSSL's functions, which return 1 or a pointer on success. */
struct ciphers { /* engine.py has the same order */
    void *(*new_context)(void);
    void (*free_context)(void *context);
    int (*init)(void *context, const void *cipher, void *engine, const unsigned char *key,
                const unsigned char *nonce, int is_encryption);
    int (*update)(void *context, unsigned char *to, int *done, const unsigned char *from, int bytes);
    int (*final)(void *context, unsigned char *to, int *done);
    int (*control)(void *context, int kind, int bytes, void *tag);
    const void *(*aes_256_gcm)(void);
    const void *(*sha256)(void);
    unsigned char *(*hmac)(const void *hash, const void *key, int key_bytes,
                           const unsigned char *data, size_t bytes, unsigned char *mac,
                           unsigned int *mac_bytes);
};

struct secret { /* engine.py has the same layout */
    unsigned char id[KEY_ID_BYTES];
    uint64_t num_bytes;
    unsigned char bytes[MAX_SECRET_BYTES];
};

struct sealing { /* how an engine encrypts blocks */
    struct ciphers ciphers;
    const struct secret *keys;
    size_t num_keys;
    const unsigned char *info; /* of HKDF, with its final counter */
    size_t info_bytes;
};

struct bound { /* bytes that are authenticated with a block */
    const unsigned char *bytes;
    size_t num_bytes;
};

/* -- system calls ------------------------------------------------------------------------------- */

enum call_kind { /* engine.py has the same order */
    CALL_OPEN,          /* a regular file below the root, not following links -> descriptor */
    CALL_CLOSE,
    CALL_READ,          /* -> bytes */
    CALL_WRITE,         /* -> bytes */
    CALL_GET_ATTRIBUTE, /* into the buffer -> bytes, or -ENODATA */
    CALL_SET_ATTRIBUTE,
    CALL_TRUNCATE,      /* to `offset` bytes */
    CALL_SYNC,          /* bytes and attributes */
    CALL_STAT,          /* stat `fd` or, if that is -1, `name`; the buffer is a file_status */
    CALL_PUBLISH,       /* rename `name` to `target` in the same folder, without replacing it */
    CALL_UNLINK,
    CALL_RENAME,        /* rename `name` to `target`, replacing it */
    CALL_CHECK_ROOT,    /* -> -ESTALE if the root's path leads elsewhere */
};

struct file_status { /* engine.py has the same layout */
    int64_t is_regular;
    int64_t disk_bytes;
    int64_t size_bytes;
    int64_t num_links;
};

struct root { /* a directory */
    int fd;
    const char *path;
};

struct folders { /* the last folders that a thread used; closed at the end of a part */
    struct folder {
        int fd; /* -1: none */
        char name[MAX_NAME_BYTES];
    } kept[KEPT_FOLDERS];
    unsigned int next; /* number of folders opened so far; the oldest one is replaced */
};

struct file_call { /* engine.py has the same layout, up to the folders */
    enum call_kind kind;
    int fd;
    int flags;                /* CALL_OPEN, in addition to O_NOFOLLOW etc. */
    int mode;                 /* of a new file; -1: derived from its folder */
    const struct root *root;
    const char *name;         /* relative to the root; or of an attribute */
    const char *target;
    const struct iovec *buffers;
    int64_t num_buffers;
    int64_t offset;
    struct folders *folders;
};

/* Implements the system calls on files; returns -errno on failure. */
typedef int64_t file_caller(const struct file_call *call);

int64_t make_system_call(const struct file_call *call);
void close_folders(struct folders *folders);

/* -- batches ------------------------------------------------------------------------------------ */

enum batch_kind { /* engine.py has the same order */
    BATCH_EXTENTS,
    BATCH_LOAD_FILES,
    BATCH_STORE_FILES,
    BATCH_HAS_FILES,
    BATCH_COPIES,
};

/* Status of a block: 0 on success, otherwise */
enum status { /* engine.py has the same values */
    STATUS_ENDED_EARLY = 255,   /* EXTENTS: the file ended early; other values are errnos */
    STATUS_NOT_DECRYPTED = 254, /* EXTENTS: the row is wiped */
    STATUS_NOT_BEGUN = 3,     /* LOAD_FILES, STORE_FILES; EXTENTS, COPIES: ECANCELED */
    STATUS_OTHERWISE = 1,     /* LOAD_FILES: not a complete, verified block below the root */
    STATUS_PRESENT = 1,       /* STORE_FILES: the name exists */
    STATUS_NOT_STORED = 2,    /* STORE_FILES: not stored; there is no temporary file */
    STATUS_VICTIM_GONE = 4,   /* STORE_FILES: the victim does not exist */
    STATUS_THERE = 1,         /* HAS_FILES: a regular file */
};

struct memory { /* consecutive rows; in a file, each occupies a slot */
    unsigned char *base;
    size_t row_bytes;
    size_t slot_bytes;
};

struct run { /* blocks at consecutive slots of a file, which fail together */
    int64_t fd;
    int64_t offset;
    int64_t length;
};

struct copy { /* of `count` fragments at equal distances */
    int64_t target;
    int64_t source;
    int64_t bytes; /* of a fragment */
    int64_t count;
    int64_t target_stride;
    int64_t source_stride;
};

struct part { /* blocks of a batch that one thread processes */
    struct batch *batch;
    struct part *next; /* in the queue */
    size_t first;
    size_t count;
    size_t run;  /* of the first block */
    size_t skip; /* blocks of that run before it */
    int64_t file; /* the descriptor it writes to; -1: no shared file */
};

struct batch {
    uint64_t ticket;
    enum batch_kind kind;
    bool is_store;
    size_t count; /* number of blocks, names or copies */

    struct memory memory; /* for copies: the target */
    const unsigned char *source;
    int64_t *rows;
    bool has_digests;
    size_t digest_bytes; /* DIGEST_BYTES; SEAL_BYTES if the engine encrypts */
    uint64_t *seeds;     /* of the blocks' digests */
    struct bound *bound; /* the blocks' keys, authenticated after the prefix; NULL: no encryption */
    const unsigned char *bound_prefix;
    size_t bound_prefix_bytes;
    struct run *runs;
    const struct copy *copies;

    struct root root;
    const char **names;
    const char **victims;   /* files to overwrite and rename; NULL: create one */
    const char *temp_stem;  /* a temporary name is the name, this, a serial number and ".tmp" */
    uint64_t first_serial;  /* serial number of the first block */
    const char *may_write;  /* for each name: whether to write it, or only to look it up */
    const char *marker;     /* victims are not overwritten if this file exists; "": never */
    const char *attribute;
    const void *value_prefix; /* prefix of the attribute's value, before the digest */
    size_t value_prefix_bytes;
    const char **expected; /* known values of the attribute, or NULL */
    int file_mode; /* -1: derived from the folder */
    bool fsync;
    bool wants_disk_bytes;

    /* the outcome, an item per block */
    unsigned char *statuses;
    unsigned char *digests; /* before an encrypted store: the seals without their tags */
    int64_t *disk_bytes;
    int64_t *freed_bytes; /* disk usage of the victims; -1: not taken */

    /* used by the engine, under its mutex */
    struct batch *next;
    struct part *parts; /* at most as many as blocks */
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
    SPARES, /* threads that replace hanging ones */
    NUM_COUNTERS,
};

struct limits {
    int threads[NUM_DIRECTIONS]; /* number of threads that prefer each direction */
    int spare_threads;
    int queued; /* maximum number of batches with queued parts, per direction */
    size_t piece_bytes; /* bytes per system call, hashed while in the cache */
    size_t part_bytes;  /* bytes per part */
};

struct worker { /* a thread and its private data */
    struct engine *engine;
    void *hash_state;
    void *cipher; /* NULL, like the next, if the engine does not encrypt */
    unsigned char *sealed; /* piece_bytes, for encrypted bytes to write */
    unsigned char cipher_has[1 + KEY_ID_BYTES + SALT_BYTES]; /* direction + 1, key id, salt */
    struct folders folders;
    _Atomic int64_t in_call_since_ns; /* 0: not in a call */
    unsigned char scratch[MAX_PAD_BYTES]; /* destination of padding that is read */

    /* guarded by the engine's mutex */
    struct worker *next;
    pthread_t thread;
    int direction; /* preferred direction */
    int64_t file;  /* the descriptor it writes to; -1: none */
    bool is_replaced;
    bool has_ended;
};

struct queue {
    struct part *first;
    struct part **last; /* link to append at */
    int num_batches;    /* with queued parts */
};

struct engine {
    struct limits limits;
    struct hashes hashes;
    struct sealing sealing; /* without keys: blocks are not encrypted */
    file_caller *call;
    int event_fd;
    char name[16]; /* kernel limit of a thread's name */
    _Atomic uint64_t counters[NUM_COUNTERS];

    pthread_mutex_t mutex; /* guards the following fields */
    pthread_cond_t work_waits;
    pthread_cond_t thread_ended;
    struct queue queues[NUM_DIRECTIONS];
    struct worker *workers;
    struct batch *ended; /* latest first; the owner is notified for the first */
    bool is_closing;
    uint64_t last_ticket; /* written by the owner only */
};

/* blocks.c: divide a batch; process a part; cancel a part. */
void cut_batch(struct batch *batch, size_t part_bytes);
void do_part(struct worker *worker, const struct part *part);
void cancel_part(const struct part *part);

static inline unsigned char *digest_of(const struct batch *batch, size_t index)
{
    return batch->digests + index * batch->digest_bytes;
}

/* sealing.c: encrypt a piece of a block or, in a load, decrypt it, also in place; the first piece
   begins at 0, and no other block of the worker comes between its pieces. Returns 0 or a status;
   until the last piece of a load returned 0, `to` is not to be trusted. */
int seal_piece(struct worker *worker, const struct batch *batch, size_t index, size_t at,
               unsigned char *to, const unsigned char *from, size_t bytes);

/* pool.c. `open` returns NULL with errno set; what `sealing` points to must outlive the engine. `close` returns the number of hanging threads;
   the engine and all memory they use must then be kept until a later call returns 0. */
struct engine *engine_open(const char *name, const struct limits *limits, file_caller *call,
                           const struct hashes *hashes, const struct sealing *sealing);
int engine_submit(struct engine *engine, struct batch *batch); /* EAGAIN, ESHUTDOWN */
struct batch *engine_take(struct engine *engine);               /* a list of the ended batches */
void engine_put_back(struct engine *engine, struct batch *batches); /* taken, for a later take */
void engine_withdraw(struct engine *engine, uint64_t ticket);   /* 0: all */
int engine_replace_hung(struct engine *engine, int64_t hung_after_ns);
int engine_close(struct engine *engine, int64_t timeout_ns);
void engine_free(struct engine *engine);
int64_t monotonic_ns(void);
void count_up(struct engine *engine, enum counter counter, uint64_t more);

#endif
