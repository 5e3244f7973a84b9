"""Multiple-choice and cloze tasks in the sense of lm-evaluation-harness: files, requests and metrics."""
