"""Looking after what `slab` tiers leave in a directory; the format is in `tiers.slab`."""
