"""Where metrics, generated texts and events of a run go."""
