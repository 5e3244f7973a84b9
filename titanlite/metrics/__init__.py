"""The metrics of a run: measuring steps, the non-finite guard, profiling, and sinks."""
