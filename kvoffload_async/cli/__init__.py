"""The `kvoffload` command: parses, shows progress, prints.

No knowledge of formats on disk, and nothing that a program could want to call.
"""
