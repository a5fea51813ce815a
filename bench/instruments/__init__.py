"""What a run measures with: clock, losses, telemetry, MLPerf log, profiler, ceilings."""
