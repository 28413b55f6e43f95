"""Maintenance of slab stores: see `SlabMaintenance`.

Not needed by an open tier.
"""
