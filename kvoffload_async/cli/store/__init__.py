"""Looking after what `fs` tiers leave in a directory: `kvoffload store`."""
