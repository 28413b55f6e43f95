"""Where this package meets other software; each of these imports one optional dependency."""
