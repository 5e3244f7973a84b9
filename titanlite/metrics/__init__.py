"""The metrics of a run: measuring steps, the guard, profiling, and sinks."""
