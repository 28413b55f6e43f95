"""Where this package meets other software; each of these imports one optional dependency.

Nothing that is useful without it.
"""
