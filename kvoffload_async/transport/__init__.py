"""Moving bytes between device and host: layouts of tensors, one transport a kind of device.

No tiers, and no keys: a transport knows device blocks and rows.
"""
