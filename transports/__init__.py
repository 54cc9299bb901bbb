"""The shelf of transports: one file each."""
