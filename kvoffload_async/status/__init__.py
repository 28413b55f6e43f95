"""The status socket of a running engine, its client, and changes between reports."""
