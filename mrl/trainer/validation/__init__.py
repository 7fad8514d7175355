"""What is refused before anything starts: ranges and rules, one file for each section of the config."""
