"""The measuring commands, a file each, next to a reference of the same run; bench/frame has what they share.

See docs/benchmarks.md.
"""
