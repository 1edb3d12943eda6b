"""Whole Spark jobs with a command line each: archive, replay, reconcile."""
