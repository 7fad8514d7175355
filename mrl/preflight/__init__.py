"""What is refused before any process group exists."""
