"""Moves blocks between memory and files, natively where that can be built."""
