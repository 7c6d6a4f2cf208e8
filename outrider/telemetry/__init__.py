"""Telemetry of a process: traces and metrics by OpenTelemetry, a page for Prometheus, logs."""
