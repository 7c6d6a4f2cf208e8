"""What a process tells of itself: traces and metrics by OpenTelemetry, a page for Prometheus, logs."""
