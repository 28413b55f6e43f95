/* Encryption of blocks with AES-256-GCM, piece by piece; the format is that of
   kvoffload_async/tiers/files/sealing.py.

   Threads: everything here runs on the engine's thread that owns the block's part, with the
   thread's own context, which keeps the AES key of the last salt.

   A seal is the key's id, a salt, a nonce and the tag. The AES key is HKDF-SHA256. */

#include "block_io.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

enum {
    GET_TAG = 0x10, /* EVP_CTRL_AEAD_GET_TAG */
    SET_TAG = 0x11, /* EVP_CTRL_AEAD_SET_TAG */
    HASH_BYTES = 32,
};

/* Derives the AES key of a seal; returns 0 or a status. */
static int derive_key(const struct sealing *sealing, const unsigned char *seal,
                      unsigned char subkey[HASH_BYTES])
{
    const struct ciphers *ciphers = &sealing->ciphers;
    const void *sha256 = ciphers->sha256();
    unsigned char extracted[HASH_BYTES];
    for (size_t i = 0; i < sealing->num_keys; i++) {
        const struct secret *secret = &sealing->keys[i];
        if (memcmp(secret->id, seal, KEY_ID_BYTES) != 0)
            continue;
        bool is_derived = ciphers->hmac(sha256, seal + KEY_ID_BYTES, SALT_BYTES, secret->bytes,
                                        secret->num_bytes, extracted, NULL) != NULL &&
                          ciphers->hmac(sha256, extracted, HASH_BYTES, sealing->info,
                                        sealing->info_bytes, subkey, NULL) != NULL;
        explicit_bzero(extracted, sizeof extracted);
        return is_derived ? 0 : EIO;
    }
    return STATUS_NOT_DECRYPTED;
}

/* Gives the context the AES key of a seal, unless it has it. Returns 0 or a status. */
static int take_key(struct worker *worker, const unsigned char *seal, bool is_store)
{
    const struct ciphers *ciphers = &worker->engine->sealing.ciphers;
    unsigned char subkey[HASH_BYTES], wanted[1 + KEY_ID_BYTES + SALT_BYTES] = {1 + is_store};
    memcpy(wanted + 1, seal, KEY_ID_BYTES + SALT_BYTES);
    if (memcmp(worker->cipher_has, wanted, sizeof wanted) == 0)
        return 0;
    memset(worker->cipher_has, 0, sizeof worker->cipher_has);
    int status = derive_key(&worker->engine->sealing, seal, subkey);
    if (status == 0 && ciphers->init(worker->cipher, ciphers->aes_256_gcm(), NULL, subkey, NULL,
                                     is_store) != 1)
        status = EIO;
    explicit_bzero(subkey, sizeof subkey);
    if (status == 0)
        memcpy(worker->cipher_has, wanted, sizeof wanted);
    return status;
}

/* Begins a block: its nonce and associated data. Returns 0 or a status. */
static int begin_block(struct worker *worker, const struct batch *batch, size_t index)
{
    const struct ciphers *ciphers = &worker->engine->sealing.ciphers;
    const struct bound *key = &batch->bound[index];
    const unsigned char *seal = digest_of(batch, index);
    uint64_t length = htole64(key->num_bytes);
    int ignored, status = take_key(worker, seal, batch->is_store);
    if (status != 0)
        return status;
    void *cipher = worker->cipher;
    bool is_begun =
        ciphers->init(cipher, NULL, NULL, NULL, seal + NONCE_AT, batch->is_store) == 1 &&
        ciphers->update(cipher, NULL, &ignored, batch->bound_prefix,
                        (int)batch->bound_prefix_bytes) == 1 &&
        ciphers->update(cipher, NULL, &ignored, (const unsigned char *)&length, sizeof length) == 1 &&
        (key->num_bytes == 0 ||
         ciphers->update(cipher, NULL, &ignored, key->bytes, (int)key->num_bytes) == 1);
    return is_begun ? 0 : EIO;
}

/* Ends a block: computes or checks its tag. Returns 0 or a status. */
static int end_block(struct worker *worker, const struct batch *batch, size_t index)
{
    const struct ciphers *ciphers = &worker->engine->sealing.ciphers;
    unsigned char *tag = digest_of(batch, index) + TAG_AT, nothing[TAG_BYTES];
    int ignored;
    if (batch->is_store)
        return ciphers->final(worker->cipher, nothing, &ignored) == 1 &&
                       ciphers->control(worker->cipher, GET_TAG, TAG_BYTES, tag) == 1
                   ? 0
                   : EIO;
    if (ciphers->control(worker->cipher, SET_TAG, TAG_BYTES, tag) != 1)
        return EIO;
    return ciphers->final(worker->cipher, nothing, &ignored) == 1 ? 0 : STATUS_NOT_DECRYPTED;
}

int seal_piece(struct worker *worker, const struct batch *batch, size_t index, size_t at,
               unsigned char *to, const unsigned char *from, size_t bytes)
{
    int ignored, status = at == 0 ? begin_block(worker, batch, index) : 0;
    if (status == 0 && worker->engine->sealing.ciphers.update(worker->cipher, to, &ignored, from,
                                                               (int)bytes) != 1)
        status = EIO;
    if (status == 0 && at + bytes == batch->memory.row_bytes)
        status = end_block(worker, batch, index);
    return status;
}
