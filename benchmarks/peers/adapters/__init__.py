"""One file a peer. Each has a class `Adapter` (see `base`)."""
