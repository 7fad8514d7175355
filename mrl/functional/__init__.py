"""Pure tensor maths: torch only, no process state, no config."""
