"""What would not work, found before a message is sent: `relay doctor`."""
