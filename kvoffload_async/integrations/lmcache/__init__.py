"""LMCache's own file tier, for benchmarks against this package's tiers; imported on demand."""
