"""Multiple-choice, schema and cloze tasks, as lm-evaluation-harness or CORE score them: files, requests and
metrics."""
