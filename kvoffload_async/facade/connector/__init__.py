"""The adapter between a serving scheduler, its workers, and an `OffloadingManager`.

Nothing of any one server: vLLM has its own in `integrations`.
"""
