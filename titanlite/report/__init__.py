"""Reports on runs: verdicts on their metrics, an HTML page, and a comparison for a terminal."""
