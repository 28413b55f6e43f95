"""Moving bytes between files and the primary: one contract, a native and a Python implementation.

A batch is submitted and awaited. The native implementation moves and hashes bytes on threads that
never take the interpreter's lock; the Python one does the same on an `IoRunner`'s threads, where
the extension module was not built, or where checksums are made with an integrity key.
"""
