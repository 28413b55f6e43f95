"""Where threads meet: the loop thread, the I/O pool, and the bridge between owner and loop."""
