"""A device's blocks as a scheduler manages them: users, free blocks, and a cache of prefixes."""

from collections import Counter

from kvoffload_async.facade.connector.protocol import NULL_BLOCK


class DevicePool:
    """With a prefix cache, free blocks are found by the tokens in them until they are taken."""

    def __init__(self, num_blocks, *, is_cache):
        self.is_cache = is_cache
        self.free = list(range(num_blocks, 0, -1))
        self.users = Counter()
        self.named = {}
        self._names = {}

    def take(self):
        """Take a free block; of a cache the one that has been free for longest."""
        block = self.free.pop(0 if self.is_cache else -1)
        self.named.pop(self._names.pop(block, None), None)
        self.users[block] = 1
        return block

    def share(self, name):
        block = self.named[name]
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1
        return block

    def release(self, block):
        if block == NULL_BLOCK:
            return
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def name(self, block, name):
        if self.is_cache and block != NULL_BLOCK and name not in self.named:
            self.named.pop(self._names.pop(block, None), None)
            self._names[block] = name
            self.named[name] = block

    def forget(self):
        self.named.clear()
        self._names.clear()

    def check(self, tables, num_blocks):
        used = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        assert used == +self.users
        assert len(set(self.free) | used.keys()) == len(self.free) + len(used) == num_blocks
