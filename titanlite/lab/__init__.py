"""Planning, measuring and tuning of runs, and scaling laws."""
