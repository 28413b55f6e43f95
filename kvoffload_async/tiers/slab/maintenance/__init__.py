"""Looking after slab stores: see `SlabMaintenance`.

Nothing that an open tier needs.
"""
