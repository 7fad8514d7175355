"""How a job ends, and that it ends: signals, the watchdog, restarts, last words."""
