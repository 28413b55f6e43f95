"""Copies between device and host memory: tensor layouts, and one transport per kind of device.

Knows device blocks and rows, but no tiers or keys.
"""
