"""Programs that a bench starts as separate processes: `python -m bench.programs.NAME`."""
