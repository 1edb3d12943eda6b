"""What consumers gave up, in the queues of dead letters: read, sent back, thrown away, saved. Start at queue.py."""
