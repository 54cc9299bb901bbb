"""The shelf of model families."""
