"""The status of a running engine: the socket that reports it, and what reads it."""
