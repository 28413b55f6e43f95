"""The adapter between a serving scheduler, its workers, and an `OffloadingManager`.

Independent of any serving engine; the adapter for vLLM is in `integrations`.
"""
