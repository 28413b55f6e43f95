"""Contracts that extensions implement: tiers, policies and transports.

Contains no implementations and no interfaces internal to the package.
"""
