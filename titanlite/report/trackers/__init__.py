"""Sinks that send a run to an experiment tracker, and the verb that fills the gaps of one."""
