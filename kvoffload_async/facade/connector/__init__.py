"""The adapter between a serving scheduler, its workers, and an `OffloadingManager`."""
