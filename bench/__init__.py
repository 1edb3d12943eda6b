"""The measuring commands: each prints ratios against a reference run beside it. See docs/benchmarks.md."""
