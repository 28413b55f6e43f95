"""Tables of many keys that no thread has to stand still for.

A million blocks must not make a pause: neither the garbage collector, which walks every set, list,
`OrderedDict` and object of a class, nor a dictionary that doubles. So a block costs no object here
beyond the bytes of its key and its number. What is known of a number lies in arrays, which the
collector does not look into; dictionaries from keys to numbers, which it does not either (up to
Python 3.13), come in many small parts.
"""
