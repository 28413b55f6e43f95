"""Looking after what tiers leave in a directory: `kvoffload store`."""
