"""Orders with their events, and a consumer that adds them up."""
