"""What is sampled, who samples it, and how samples travel."""
