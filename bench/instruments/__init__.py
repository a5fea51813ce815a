"""Instruments of a run: clock, losses, telemetry, progress, and watches that end a run that fails or hangs."""
