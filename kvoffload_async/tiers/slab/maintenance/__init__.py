"""Looking after slab stores: see `SlabMaintenance`."""
