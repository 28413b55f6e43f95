"""The ways from a request to the tiers: step by step for a scheduler, or awaited on a loop."""
