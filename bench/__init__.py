"""Measurements, and the faults that tests and measurements share."""
