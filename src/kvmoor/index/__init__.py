"""Which block is in which slot: keys, states, leases and eviction. Numbers only; no bytes, no devices."""
