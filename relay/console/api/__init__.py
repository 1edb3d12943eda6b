"""`/api/v1`: what the commands do, as HTTP."""
