"""What a run reports: measuring a step, and the sinks that keep it."""
