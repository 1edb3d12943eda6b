"""What an operator does: migrate, status, parked messages."""
