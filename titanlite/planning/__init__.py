"""Answers about a job from short runs and arithmetic, before it is trained."""
