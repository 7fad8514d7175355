"""Launcher environment, rendezvous, process groups; `watchdog/` (hangs, signals), `worker_processes/` (sandbox)."""
