"""`make demo`: real purchases from Spark through outbox, relay and RabbitMQ to a consumer, and then reconciled.

Read `demo/__main__.py` first: it is the whole way, one step a line.
"""
