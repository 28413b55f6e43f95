"""Transfers between files and the primary: one interface, a native and a Python implementation.

A batch is submitted and awaited. The native implementation copies, hashes and encrypts on threads
that never take the GIL. The Python one uses the threads of an `IoRunner`; it is used if the
extension module is missing, if checksums are keyed with an integrity key, or if blocks are
encrypted and the interpreter's OpenSSL is not found.
"""
