"""Key tables without long pauses, for millions of keys.

Neither the garbage collector, which traverses every set, list, `OrderedDict` and class instance,
nor a growing dictionary may cause a pause. So a block needs no objects except its key's bytes and
its number. Data by number is stored in arrays, which the collector does not traverse; dictionaries
from keys to numbers, which it does not either (up to Python 3.13), are split into many small parts.
"""
