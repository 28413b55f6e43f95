"""Storage tiers as async actors; `files` is what those on disk share."""
