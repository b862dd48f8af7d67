"""Payload transforms: rounding, thinning out, privacy."""
