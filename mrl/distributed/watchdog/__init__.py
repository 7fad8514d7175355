"""How a job ends, and that it ends: stop signals, time limits, the watchdog for ranks that hang, restarts."""
