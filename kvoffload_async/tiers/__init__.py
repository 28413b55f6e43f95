"""Storage tiers as async actors, one module each."""
