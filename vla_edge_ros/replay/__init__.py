"""Host: recorded bags."""
