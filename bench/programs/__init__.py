"""Programs that a bench starts as processes of their own: `python -m bench.programs.NAME`."""
